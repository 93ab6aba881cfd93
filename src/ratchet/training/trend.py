"""The trend test of Mann and Kendall, by which guards find rising losses and early stopping finds a plateau."""

import math
from collections import Counter
from collections.abc import Sequence


def mann_kendall(values: Sequence[float]) -> float:
    """Return the statistic Z of the trend test: above 0 for a rising trend, about standard normal without a trend.

    The test counts pairs that rise and pairs that fall, so it needs no scale and no shape of the trend, and one outlier
    hardly matters (Mann, "Nonparametric tests against trend", Econometrica 13, 1945; Kendall, Rank Correlation Methods,
    1975, with the corrections for ties and for continuity). It assumes independent values.
    """
    n = len(values)
    score = sum((b > a) - (b < a) for i, a in enumerate(values) for b in values[i + 1 :])
    ties = sum(count * (count - 1) * (2 * count + 5) for count in Counter(values).values())
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    if score == 0 or variance <= 0:
        return 0.0
    return (score - math.copysign(1, score)) / math.sqrt(variance)
