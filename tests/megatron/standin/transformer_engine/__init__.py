"""A stand-in for Transformer Engine on a host: the modules that Megatron's spec derives from, in torch, with TE's names and TE's marks.

The tests of ``te_spec`` put it on the path of ranks of their own. It is no measure of TE's arithmetic; ``tests/gpu/te_compare.py`` is.
"""

from . import common as common
from . import pytorch as pytorch

__version__ = "1.12.0"  # later ones make Megatron reach for more of TE
