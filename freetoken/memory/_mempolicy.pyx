"""The kernel's memory policies, call by call: what `placement` decides, this asks for. It keeps no state.

Each function makes one system call and raises OSError with its errno; ENOSYS where this system or architecture has no
such call (`SUPPORTED` is then False).
"""
import os

from libc.string cimport memset

cdef extern from "mempolicy.h" nogil:
    enum:
        FT_HAS_MEMPOLICY
        FT_MASK_BITS
        FT_WORD_BITS
        FT_MAP_HUGETLB "MAP_HUGETLB"
        FT_MADV_POPULATE_WRITE "MADV_POPULATE_WRITE"
    ctypedef struct ft_node_mask:
        unsigned long *words
    int ft_mbind(size_t address, size_t nbytes, int mode, const unsigned long *mask, unsigned flags)
    int ft_set_mempolicy(int mode, const unsigned long *mask)
    int ft_get_mempolicy(int *mode, unsigned long *mask, size_t address)
    int ft_locate_pages(size_t count, const size_t *pages, int *nodes)

SUPPORTED = bool(FT_HAS_MEMPOLICY)
DEFAULT = 0
PREFERRED = 1
BIND = 2
INTERLEAVE = 3
MAP_HUGETLB = FT_MAP_HUGETLB    # flag of mmap; 0 where there is none
MADV_POPULATE_WRITE = FT_MADV_POPULATE_WRITE


cdef int fill_mask(ft_node_mask *mask, nodes) except -1:
    cdef int node
    memset(mask, 0, sizeof(ft_node_mask))
    for node in nodes:
        if not 0 <= node < FT_MASK_BITS:
            raise ValueError(f"node {node} is not from 0 to {FT_MASK_BITS - 1}")
        mask.words[node // FT_WORD_BITS] |= (<unsigned long> 1) << (node % FT_WORD_BITS)
    return 0


cdef list read_mask(const ft_node_mask *mask):
    return [
        node for node in range(FT_MASK_BITS) if mask.words[node // FT_WORD_BITS] >> <unsigned> (node % FT_WORD_BITS) & 1
    ]


cdef int check(int error, str call) except -1:
    if error:
        raise OSError(error, f"{call}: {os.strerror(error)}")
    return 0


def mbind(size_t address, size_t nbytes, int mode, nodes=()):
    """Set the policy of the pages of [address, address + nbytes) that are touched from now on.

    address: a multiple of the page size. nodes: ids; none for DEFAULT.
    """
    cdef ft_node_mask mask
    fill_mask(&mask, nodes)
    check(ft_mbind(address, nbytes, mode, mask.words if nodes else NULL, 0), "mbind")


def set_mempolicy(int mode, nodes=()):
    """Set the policy of what the calling thread allocates from now on."""
    cdef ft_node_mask mask
    fill_mask(&mask, nodes)
    check(ft_set_mempolicy(mode, mask.words if nodes else NULL), "set_mempolicy")


def get_mempolicy(size_t address=0):
    """(mode, nodes): the policy of the mapping at an address, or of the calling thread."""
    cdef ft_node_mask mask
    cdef int mode = 0
    memset(&mask, 0, sizeof(mask))
    check(ft_get_mempolicy(&mode, mask.words, address), "get_mempolicy")
    return mode, tuple(read_mask(&mask))


def locate_pages(const size_t[::1] pages, int[::1] nodes):
    """Write the node of each page (addresses in them) into `nodes`; a negative errno for a page that lies nowhere."""
    if nodes.shape[0] != pages.shape[0]:
        raise ValueError(f"{pages.shape[0]} pages, room for {nodes.shape[0]} nodes")
    if pages.shape[0]:
        check(ft_locate_pages(pages.shape[0], &pages[0], &nodes[0]), "move_pages")
