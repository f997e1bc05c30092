# SPDX-License-Identifier: Apache-2.0
from .batches import (
    array_batches as array_batches,
)
from .batches import (
    parquet_batches as parquet_batches,
)
from .folders import BlockError as BlockError
from .stream import (
    Stream as Stream,
)
from .stream import (
    stream as stream,
)
