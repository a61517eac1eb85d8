"""ggml as llama-cpp-python brings it; its one option is "plain", blocks as in files, or "repack", in ggml's own order.

One graph takes a token through all layers, as llama.cpp builds it for a mixture of experts. llama.cpp repacks by
default where ggml can. The library is called by its public C interface.
"""

import ctypes
import importlib.metadata
import importlib.util
import mmap
import sys
import time
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from experts import Expert, Problem, rotate
from numpy.typing import NDArray
from protocol import MissingError, Ready, Task, play, require

TYPES = {
    "bf16": (30, "bf16"),
    "q8_0": (8, "q8_0"),
    "q4_0": (2, "q4_0"),
    "mxfp4": (39, "mxfp4"),
    "ds_fp4": (39, "mxfp4"),
    "nvfp4": (40, "nvfp4"),
}
"""Format -> number and name of ggml's type of the same bytes."""
F32, I32 = 0, 26
BATCH = 8
"""Tokens between two looks at the clock."""
ROOM = 1024
"""Bytes enough for ggml_threadpool_params, which only ggml fills and reads."""


FEATURES = ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_int8", "neon", "sve")
"""What ggml can have been built for, and says of itself."""


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


P, L, Z = c_void_p, c_int64, c_size_t
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ggml_init": (P, InitParams),
    "ggml_free": (None, P),
    "ggml_tensor_overhead": (Z,),
    "ggml_graph_overhead_custom": (Z, Z, c_bool),
    "ggml_type_name": (c_char_p, c_int),
    "ggml_row_size": (Z, c_int, L),
    "ggml_nbytes": (Z, P),
    "ggml_quantize_chunk": (Z, c_int, P, P, L, L, L, P),
    "ggml_new_tensor_3d": (P, P, c_int, L, L, L),
    "ggml_mul_mat_id": (P, P, P, P, P),
    "ggml_swiglu_split": (P, P, P, P),
    "ggml_mul": (P, P, P, P),
    "ggml_add": (P, P, P, P),
    "ggml_get_rows": (P, P, P, P),
    "ggml_view_2d": (P, P, P, L, L, Z, Z),
    "ggml_new_graph_custom": (P, P, Z, c_bool),
    "ggml_build_forward_expand": (None, P, P),
    "ggml_backend_alloc_ctx_tensors_from_buft": (P, P, P),
    "ggml_backend_buffer_get_base": (P, P),
    "ggml_backend_buffer_get_size": (Z, P),
    "ggml_backend_cpu_buffer_type": (P,),
    "ggml_backend_tensor_set": (None, P, P, Z, Z),
    "ggml_backend_tensor_get": (None, P, P, Z, Z),
    "ggml_backend_graph_compute": (c_int, P, P),
    "ggml_backend_reg_dev_get": (P, P, Z),
    "ggml_backend_reg_get_proc_address": (P, P, c_char_p),
    "ggml_backend_dev_supports_op": (c_bool, P, P),
    "ggml_backend_cpu_reg": (P,),
    "ggml_backend_cpu_init": (P,),
    "ggml_backend_cpu_set_n_threads": (None, P, c_int),
    "ggml_backend_cpu_set_threadpool": (None, P, P),
    "ggml_threadpool_params_init": (None, P, c_int),
    "ggml_threadpool_new": (P, P),
    **{f"ggml_cpu_has_{name}": (c_int,) for name in FEATURES},
}
"""Name -> what it returns and takes."""


class Library:
    """ggml's functions as attributes, without their common prefix."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("llama_cpp")
        folder = Path(spec.origin).parent / "lib" if spec and spec.origin else Path()
        try:
            parts = [ctypes.CDLL(folder / f"libggml{part}.so", ctypes.RTLD_GLOBAL) for part in ("-base", "-cpu")]
        except OSError as error:
            raise MissingError(f"its libraries do not load: {error}") from error
        for name, (returns, *takes) in FUNCTIONS.items():
            function = next((getattr(part, name) for part in parts if hasattr(part, name)), None)
            if function is None:
                raise MissingError(f"its ggml has no {name}")
            function.restype, function.argtypes = returns, takes
            setattr(self, name.removeprefix("ggml_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def context(self, tensors: int, nodes: int = 0) -> Any:
        """Room for the descriptions of so many tensors and a graph."""
        size = tensors * self.tensor_overhead() + (self.graph_overhead_custom(nodes, False) if nodes else 0)
        return self.init(InitParams(size, None, True))

    def allocate(self, context: Any, kind: Any) -> Any:
        """Memory for all tensors of a context, on huge pages where the system has them."""
        buffer = self.backend_alloc_ctx_tensors_from_buft(context, kind)
        if not buffer:
            raise MemoryError("ggml has no memory for its tensors")
        base, size = self.backend_buffer_get_base(buffer), self.backend_buffer_get_size(buffer)
        first = -(-base // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (base + size - first) // mmap.PAGESIZE * mmap.PAGESIZE
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (P, Z, c_int)
        if length > 0:
            madvise(first, length, mmap.MADV_HUGEPAGE)
        return buffer

    def write(self, tensor: Any, values: NDArray[Any]) -> None:
        """All of a tensor."""
        assert values.nbytes == self.nbytes(tensor)
        self.backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)

    def read(self, tensor: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """An fp32 tensor."""
        values = np.empty(shape, np.float32)
        self.backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
        return values

    def buffer_types(self) -> list[Any]:
        """What ggml offers beside plain memory for weights of its CPU backend."""
        register = self.backend_cpu_reg()
        address = self.backend_reg_get_proc_address(register, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return []
        found = ctypes.CFUNCTYPE(POINTER(P), P)(address)(self.backend_reg_dev_get(register, 0))
        kinds = []
        while found and found[len(kinds)]:
            kinds.append(found[len(kinds)])
        return kinds


class Runner:
    """The CPU backend with a pool of threads that stay."""

    def __init__(self, ggml: Library, threads: int) -> None:
        self.ggml = ggml
        self.backend = ggml.backend_cpu_init()
        ggml.backend_cpu_set_n_threads(self.backend, threads)
        params = ctypes.create_string_buffer(ROOM)
        ggml.threadpool_params_init(params, threads)
        ggml.backend_cpu_set_threadpool(self.backend, ggml.threadpool_new(params))

    def compute(self, graph: Any) -> None:
        if self.ggml.backend_graph_compute(self.backend, graph):
            raise RuntimeError("ggml could not compute its graph")


def quantize(ggml: Library, kind: int, matrix: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rows (N, bytes) of blocks of a matrix (N, K)."""
    n, k = matrix.shape
    rows = np.empty((n, ggml.row_size(kind, k)), np.uint8)
    values = np.ascontiguousarray(matrix, np.float32)
    ggml.quantize_chunk(kind, values.ctypes.data, rows.ctypes.data, 0, n, k, None)
    return rows


def dequantize(ggml: Library, runner: Runner, kind: int, rows: NDArray[np.uint8], k: int) -> NDArray[np.float32]:
    """The values (N, K) of rows of blocks."""
    n = len(rows)
    context = ggml.context(3, 8)
    source = ggml.new_tensor_3d(context, kind, k, n, 1)
    order = ggml.new_tensor_3d(context, I32, n, 1, 1)
    values = ggml.get_rows(context, source, order)
    ggml.allocate(context, ggml.backend_cpu_buffer_type())
    ggml.write(source, rows)
    ggml.write(order, np.arange(n, dtype=np.int32))
    graph = ggml.new_graph_custom(context, 8, False)
    ggml.build_forward_expand(graph, values)
    runner.compute(graph)
    return ggml.read(values, (n, k))


class Layers:
    """Weights of all layers, and a graph from x and ids to what each layer gives."""

    def __init__(self, ggml: Library, task: Task, kind: int, memory: Any) -> None:
        self.ggml, self.task = ggml, task
        e, h, i, k = task.experts, task.hidden, task.width, task.top_k
        held = ggml.context(3 * task.layers)
        shapes = ((h, i), (h, i), (i, h))
        self.weights = [[ggml.new_tensor_3d(held, kind, *shape, e) for shape in shapes] for _ in range(task.layers)]
        ggml.allocate(held, memory)
        nodes = task.layers * (2 * k + 8) + 8
        context = ggml.context(nodes, nodes)
        self.graph = ggml.new_graph_custom(context, nodes, False)
        self.x = ggml.new_tensor_3d(context, F32, h, 1, 1)
        self.scales = ggml.new_tensor_3d(context, F32, 1, k, 1)
        self.ids = [ggml.new_tensor_3d(context, I32, k, 1, 1) for _ in range(task.layers)]
        self.outputs, self.products = [], []
        for (gate, up, down), ids in zip(self.weights, self.ids, strict=True):
            products = [ggml.mul_mat_id(context, matrix, self.x, ids) for matrix in (gate, up)]
            inner = ggml.swiglu_split(context, *products)
            products.append(ggml.mul_mat_id(context, down, inner, ids))
            each = ggml.mul(context, products[-1], self.scales)
            total, *others = (ggml.view_2d(context, each, h, 1, k * h * 4, n * h * 4) for n in range(k))
            for other in others:
                total = ggml.add(context, total, other)
            ggml.build_forward_expand(self.graph, total)
            self.outputs.append(total)
            self.products += products
        ggml.allocate(context, ggml.backend_cpu_buffer_type())

    def can_run(self) -> bool:
        """Whether ggml has kernels for these weights where they lie."""
        device = self.ggml.backend_reg_dev_get(self.ggml.backend_cpu_reg(), 0)
        return all(self.ggml.backend_dev_supports_op(device, product) for product in self.products)

    def fill(self, blocks: list[NDArray[np.uint8]]) -> None:
        """Put every expert's blocks, given one's, into the weights."""
        for number, tensors in enumerate(self.weights):
            for tensor, rows in zip(tensors, blocks, strict=True):
                whole = np.empty((self.task.experts, *rows.shape), np.uint8)
                for expert in range(self.task.experts):
                    whole[expert] = rotate(rows, number * self.task.experts + expert)
                self.ggml.write(tensor, whole)

    def route(self, ids: NDArray[np.int32]) -> None:
        """Choose the experts of each layer: (layers, K)."""
        for tensor, row in zip(self.ids, ids, strict=True):
            self.ggml.write(tensor, row)


def start(task: Task) -> Ready:
    require("llama_cpp", "llama-cpp-python")
    if task.format not in TYPES:
        raise MissingError("ggml has no such type")
    ggml, (kind, name) = Library(), TYPES[task.format]
    if ggml.type_name(kind) != name.encode():
        raise MissingError("its ggml is older than this type")
    runner, problem = Runner(ggml, task.threads), Problem(task)
    matrices = (problem.expert.gate, problem.expert.up, problem.expert.down)
    blocks = [quantize(ggml, kind, matrix) for matrix in matrices]
    held = Expert(*(dequantize(ggml, runner, kind, b, m.shape[1]) for b, m in zip(blocks, matrices, strict=True)))
    memories = [ggml.backend_cpu_buffer_type()] if task.options == ("plain",) else ggml.buffer_types()
    for memory in memories:
        layers = Layers(ggml, task, kind, memory)
        if layers.can_run():
            break
    else:
        raise MissingError("ggml repacks no such type on this processor")
    layers.fill(blocks)
    ggml.write(layers.x, problem.x)
    ggml.write(layers.scales, problem.weights)

    def run() -> tuple[int, float]:
        seconds = 0.0
        for _ in range(BATCH):
            layers.route(problem.routes(task.layers))
            begin = time.perf_counter()
            runner.compute(layers.graph)
            seconds += time.perf_counter() - begin
        return BATCH * task.layers, seconds

    ids = problem.routes(task.layers)
    layers.route(ids)
    runner.compute(layers.graph)
    for number, (row, output) in enumerate(zip(ids, layers.outputs, strict=True)):
        problem.check(number, row, ggml.read(output, (task.hidden,)), held)
    version = importlib.metadata.version("llama-cpp-python")
    built = [name for name in FEATURES if getattr(ggml, f"cpu_has_{name}")()]
    return Ready(task.top_k * sum(b.nbytes for b in blocks), f"llama-cpp-python {version} for {', '.join(built)}", run)


if __name__ == "__main__":
    play(start)
