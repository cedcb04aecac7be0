"""nobounce.kv: blocks of many tensors under keys, in one preallocated file. docs/kv.md describes the file."""

from __future__ import annotations

from nobounce.kv.result import BlockResult, BlockTransfer
from nobounce.kv.store import BlockStore

__all__ = ["BlockResult", "BlockStore", "BlockTransfer"]
