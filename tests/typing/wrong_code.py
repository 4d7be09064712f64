"""Mistakes that a type checker must find. Every wrong line says which error it expects."""

from __future__ import annotations

import bagua

bagua.init(rank="0")  # expect: arg-type
bagua.init(nprocs=2)  # expect: call-arg
bagua.all_reduce("text", op="sum", out=1, async_op="yes")  # expect: call-overload
bagua.all_reduce(bytearray(4), op="sun")  # expect: call-overload
bagua.scatter_object(1)  # expect: arg-type
bagua.no_such_name()  # expect: attr-defined
