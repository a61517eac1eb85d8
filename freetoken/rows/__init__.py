"""Tables of very many short rows, of which a step needs a few: in memory, or read from the files they lie in.

base.py     RowTable: what a table promises: rows by number, in the order asked for, and their scales
table.py    DiskRowTable: rows read when they are wanted; memory is bounded by what is read at once
places.py   in which bytes of which files a table lies: tensors of a checkpoint, or files as they are
memory.py   MemoryRowTable: the same in memory
ngrams.py   from the last tokens to rows

ids -> sorted, the same ones once -> aligned reads, neighbours together -> io_uring or threads -> rows, as asked
       `------------------------------ _reader.pyx, without the GIL -----------------------------'
                                      ring.h: io_uring; pool.h: threads; rowfile.h: direct and plain reads
"""

from freetoken.rows.base import RowTable
from freetoken.rows.memory import MemoryRowTable
from freetoken.rows.ngrams import NgramHash
from freetoken.rows.places import RowFile, SafetensorsRows
from freetoken.rows.table import DiskRowTable

__all__ = ["DiskRowTable", "MemoryRowTable", "NgramHash", "RowFile", "RowTable", "SafetensorsRows"]
