"""Checkpoints: complete or absent on disk, verified on load, written in the background, exact to the bit.

`disk` writes and reads one checkpoint, `manifest` knows when it is whole, `async_writer` saves while training goes on
and keeps the right ones.
"""

from trimtab.checkpoint.async_writer import CheckpointWriter
from trimtab.checkpoint.disk import SavedInfo, latest_good, load, read_meta, save

__all__ = ["CheckpointWriter", "SavedInfo", "latest_good", "load", "read_meta", "save"]
