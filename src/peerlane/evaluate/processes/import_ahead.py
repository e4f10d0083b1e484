"""The part of torch that takes seconds to import: the fork server imports it once for all ranks whose candidate may want it.

It is torch's own. No code of a candidate runs there; its source is only looked at for names.
"""

import re

MODULE = "torch._dynamo"
"""It imports DTensor, FSDP and ``torch.distributed.nn`` too."""
_NEED_IT = re.compile(
    r"torch\.compile\b|torch import .*\bcompile\b|_dynamo\b|\bflex_attention\b|\battention\.bias\b|\bcausal_(lower|upper)_|\bDTensor\b"
    r"|\bdistributed\.(nn|fsdp|_?tensor|device_mesh|_composable)\b|\b_functional_collectives\b|\bfully_shard\b|\bFullyShardedDataParallel\b"
)


def wants_import(source: str) -> bool:
    """Tells whether a candidate with this source may import it. Once too often costs seconds once, and changes no verdict."""
    return _NEED_IT.search(source) is not None
