# SPDX-License-Identifier: Apache-2.0
from .ordered import (
    bins_from_sketch as bins_from_sketch,
)
from .ordered import (
    find_thresholds as find_thresholds,
)
from .sketch import (
    QuantileSketch as QuantileSketch,
)
from .sketch import (
    make_sketch as make_sketch,
)
from .sketch import (
    merge_sketches as merge_sketches,
)
from .sketch import (
    summarize_sketch as summarize_sketch,
)
from .sketch import (
    update_sketch as update_sketch,
)
from .summary import (
    QuantileSummary as QuantileSummary,
)
from .summary import (
    bound_ranks as bound_ranks,
)
from .summary import (
    find_candidates as find_candidates,
)
from .summary import (
    make_summary as make_summary,
)
from .summary import (
    merge_summaries as merge_summaries,
)
from .summary import (
    prune_summary as prune_summary,
)
from .summary import (
    query_ranks as query_ranks,
)
