"""Compiles every .pyx of the package; metadata is in setup.cfg."""

import os
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

OPENMP = ["-fopenmp"] if sys.platform.startswith("linux") else []
HEADERS = [str(path) for path in sorted(Path("freetoken").rglob("*.h"))]
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "embedsignature": False,
}

setup(
    ext_modules=cythonize(
        [
            Extension(
                ".".join(path.with_suffix("").parts),
                [str(path)],
                include_dirs=sorted({str(Path(header).parent) for header in HEADERS}),
                depends=HEADERS,
                extra_compile_args=["-O3", "-g0", *OPENMP],  # debug sections would be four fifths of a wheel's code
                extra_link_args=OPENMP,
            )
            for path in sorted(Path("freetoken").rglob("*.pyx"))
        ],
        compiler_directives=DIRECTIVES,
        build_dir="build/cython",
    ),
    options={"build_ext": {"parallel": os.cpu_count()}},
)
