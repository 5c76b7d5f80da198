"""The layout of autograd's nodes, by which native code walks a graph without a Python object for each node.

Torch documents no layout of nodes, so each offset is searched for in a sample graph: the word there must be
what torch's own attributes say, for every sample.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch

_WORD = ctypes.sizeof(ctypes.c_void_p)
_NODE_SIZE = 18 * _WORD
"""Bytes of a node that are searched; nodes have more in every version of torch."""
_METADATA_SIZE = 8 * _WORD

_HEAP_TYPE = 1 << 9
"""Flag of a type that Python code has made, whose objects are laid out otherwise: functions of programs."""

NodeLayout = tuple[int, int, int, int, int, int, int]
"""Offsets for `amanda.interceptor.Graphs`.

In a node's Python object, of the address of the node.  In a node, of the address of that object, of its
number, of the address of its first edge, which is followed by that of their end, and of the address of its
metadata.  In the metadata, of the address of their dict.  Last, the bytes of an edge, which begins with the
address of a node, and whose last word is the number of an input.
"""


def find_node_layout() -> NodeLayout | None:
    """Return the layout of this torch's nodes; None if they are not as this driver knows them."""
    # The driver may be imported under modes and transforms of the program, where samples may have no nodes.
    with torch.inference_mode(False), torch.enable_grad():
        x, y, z = (torch.ones(2, device="cpu", requires_grad=True) for _ in range(3))
        results = [x.exp(), x * y, torch.addcmul(x, y, z)]  # nodes with one, two and three edges
        later_results = [result.sin() for result in results]
    nodes, later_nodes = ([result.grad_fn for result in batch] for batch in (results, later_results))
    if any(node is None or type(node).__flags__ & _HEAP_TYPE for node in (*nodes, *later_nodes)):
        return None
    try:
        return _layout_of(nodes, later_nodes)
    except LookupError:
        return None


def _layout_of(nodes: list[Any], later_nodes: list[Any]) -> NodeLayout:
    """Return the layout of nodes; raise LookupError if a part is not found.

    later_nodes: one behind each of the nodes, with one edge.
    """
    address = object.__basicsize__
    objects = [*nodes, *later_nodes]
    addresses = _words(map(id, objects), address)
    if not all(addresses) or any(node % _WORD for node in addresses):
        raise LookupError("the address of a node")
    to_object = _find(addresses, _NODE_SIZE, list(map(id, objects)))
    number = _find(addresses, _NODE_SIZE, [node._sequence_nr() for node in objects])
    edges, edge_size = _edge_layout([len(node.next_functions) for node in nodes], addresses)
    nulls = [offset for offset in range(0, _NODE_SIZE, _WORD) if not any(_words(addresses, offset))]
    dicts = [id(node.metadata) for node in objects]  # torch makes the metadata when they are asked for
    for metadata in nulls:
        if all(owners := _words(addresses, metadata)):
            to_dict = _find(owners, _METADATA_SIZE, dicts)
            return address, to_object, number, edges, metadata, to_dict, edge_size
    raise LookupError("the metadata of a node")


def _edge_layout(counts: list[int], addresses: list[int]) -> tuple[int, int]:
    """Return the offset of the address of a node's first edge, and the bytes of an edge.

    counts: numbers of edges of the first half of the nodes; each of the others has one, to one of those.
    """
    nodes, later_nodes = addresses[: len(counts)], addresses[len(counts) :]
    for edge_size in (2 * _WORD, 3 * _WORD):
        for offset in range(0, _NODE_SIZE - _WORD, _WORD):
            begins, ends = _words(nodes, offset), _words(nodes, offset + _WORD)
            lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
            edges, edge_ends = _words(later_nodes, offset), _words(later_nodes, offset + _WORD)
            if lengths != [count * edge_size for count in counts] or edge_ends != [
                edge + edge_size for edge in edges
            ]:
                continue
            inputs = [ctypes.c_uint32.from_address(edge + edge_size - _WORD).value for edge in edges]
            if _words(edges, 0) == nodes and not any(inputs):
                return offset, edge_size
    raise LookupError("the edges of a node")


def _find(addresses: Sequence[int], size: int, expected: list[int]) -> int:
    """Return the first offset of these words behind addresses; raise LookupError if there is none."""
    for offset in range(0, size, _WORD):
        if _words(addresses, offset) == expected:
            return offset
    raise LookupError("a part of a node")


def _words(addresses: Iterable[int], offset: int) -> list[int]:
    return [ctypes.c_uint64.from_address(address + offset).value for address in addresses]
