"""Which bucket each training row comes from, so that the shares hold from the first row on."""

import math
from collections.abc import Sequence
from fractions import Fraction

_FINEST_SHARE = 10**9  # the reciprocal of


class RowSchedule:
    """Buckets in turn by their shares: after any number of rows, what each of k buckets with a share has had differs
    from its share of the rows by at most 1 - 1 / (2 k - 2) rows.

    R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980), 323-330. The counts are exact after
    each `period`, so the schedule begins again there.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        """shares: from 0 on, 1 together but for rounding."""
        fractions = [Fraction(share).limit_denominator(_FINEST_SHARE) for share in shares]
        fractions = [share / sum(fractions) for share in fractions]
        self._period = math.lcm(*(share.denominator for share in fractions))
        self._weights = [int(share * self._period) for share in fractions]  # rows of a period
        self._counts = [tuple(0 for _ in shares)]  # after each row, as far as anybody asked

    def counts(self, num_rows: int) -> tuple[int, ...]:
        """How many of the first `num_rows` rows come from each bucket."""
        periods, rest = divmod(num_rows, self._period)
        while len(self._counts) <= rest:
            last, bucket = self._counts[-1], self._next()
            self._counts.append(tuple(count + (index == bucket) for index, count in enumerate(last)))
        return tuple(periods * weight + count for weight, count in zip(self._weights, self._counts[rest], strict=True))

    def _next(self) -> int:
        """The bucket of the row after those that are counted: of those that are due the one with the next deadline."""
        having = [index for index, weight in enumerate(self._weights) if weight]
        if len(having) == 1:
            return having[0]
        slack = 2 * len(having) - 2
        num_rows, taken = len(self._counts), self._counts[-1]
        deadlines = {}
        for index in having:
            missing = slack * (self._weights[index] * num_rows - taken[index] * self._period)
            if missing >= self._period:
                deadlines[index] = Fraction((slack - 1) * self._period - missing, self._weights[index])
        return min(deadlines, key=lambda index: (deadlines[index], index))
