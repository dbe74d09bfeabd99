"""What a trial of a study carries: user attributes, all JSON, that hold exactly what was scored and what came out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optuna import Trial
from optuna.trial import FrozenTrial, TrialState

from ropesearch.errors import InputError
from ropesearch.files import sha256_of_json
from ropesearch.rope.regime import Regime
from ropesearch.score.score import Score
from ropesearch.search.space import SEARCHED, Candidate

OWNER = "owner"  # id of the worker that scores it
METHOD = "method"  # "searched" or the baseline's name
CANDIDATE = "candidate"  # searched trials: [factor_steps, attention_steps, retained_tokens] in grid steps
NUM_STEPS = "num_steps"  # in a plan: how many gradient steps come first
GUARD_WEIGHT = "guard_weight"  # in a plan: the weight of the guard's tokens in the objective that its steps follow
REGIME = "regime"  # the regime that is scored: factors, attention_factor, retained_tokens
SECONDS = "seconds"  # that the scoring took
COST = "num_forward_equivalent_tokens"  # that the scoring took; 0 where a score was reused
REUSED_FROM = "reused_from"  # number of the trial whose score it took over, where the same regime had been scored
SCORE = "score"  # nats and tokens by window and position block; written last, before the trial is finished
GUARD = "short_excess_nats"  # a constraint, not an attribute: nats per token above what the objective's guard allows
MARK = "mark"  # number of the trial that it is raced against, see racing.py; its windows are scored one by one then
STOPPED_AFTER = "stopped_after"  # how many windows it was stopped after in a race; its state is PRUNED then
ESTIMATE = "estimated_nats_per_token"  # what it looked like then: the mark's, and by how much it was worse so far
FAILURE = "failure"  # why it could not be scored; likewise
PLAN = "plan"  # of a sampler that takes gradients: what has to be done before the candidate is known, see gradient.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A gradient step of a trial: the window that was looked at, the objective's nats per token on it alone, and the
    derivatives of these by the logs of the factors, one for each pair, and of the attention factor.
    """

    window: int
    nats_per_token: float
    gradient: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """The step as JSON values; floats survive exactly."""
        return {"window": self.window, "nats_per_token": self.nats_per_token, "gradient": list(self.gradient)}


def step_key(index: int) -> str:
    """The attribute that holds a trial's gradient step `index`, counted from 0."""
    return f"step_{index:03d}"


def recorded_steps(trial: FrozenTrial | Trial) -> list[Step]:
    """The gradient steps that a trial has made so far, in order."""
    found: list[Step] = []
    while (value := trial.user_attrs.get(step_key(len(found)))) is not None:
        found.append(Step(**{**value, "gradient": tuple(value["gradient"])}))
    return found


def window_key(index: int) -> str:
    """The attribute that holds the score of window `index` alone of a trial that is raced, counted from 0."""
    return f"window_{index:03d}"


def recorded_windows(trial: FrozenTrial | Trial) -> list[Score]:
    """What a trial that is raced, or was stopped, has scored so far: one score for each window, in order."""
    found: list[Score] = []
    while (value := trial.user_attrs.get(window_key(len(found)))) is not None:
        found.append(Score.from_json(value))
    return found


def regime_json(regime: Regime) -> dict[str, Any]:
    """The values of a regime that a score depends on; floats survive JSON exactly."""
    return {
        "factors": list(regime.factors),
        "attention_factor": regime.attention_factor,
        "retained_tokens": regime.retained_tokens,
    }


def identity(regime: Regime) -> str:
    """A name for the exact values of a regime, the same for two methods that lead to the same values."""
    return sha256_of_json(regime_json(regime))


def candidate_json(candidate: Candidate) -> list[Any]:
    """A candidate for the attribute CANDIDATE."""
    return [list(candidate.factor_steps), candidate.attention_steps, candidate.retained_tokens]


def recorded_candidate(trial: FrozenTrial) -> Candidate | None:
    """The candidate that a trial carries; None for baselines and for trials that were killed before it was written."""
    value = trial.user_attrs.get(CANDIDATE)
    return None if value is None else Candidate(tuple(value[0]), value[1], value[2])


def recorded_plan(trials: Sequence[FrozenTrial], number: int) -> dict[str, Any] | None:
    """The plan that trial `number` carries; None where it carries none, or is not there yet."""
    return trials[number].user_attrs.get(PLAN) if number < len(trials) else None


def recorded_regime(trial: FrozenTrial | Trial, max_length: int) -> Regime:
    """The regime that a trial carries, named by its method.

    Raises InputError for a trial that this program did not write.
    """
    try:
        value = trial.user_attrs[REGIME]
        return Regime(
            name=trial.user_attrs[METHOD],
            max_length=max_length,
            factors=tuple(value["factors"]),
            attention_factor=value["attention_factor"],
            retained_tokens=value["retained_tokens"],
        )
    except KeyError as error:
        raise InputError(
            f"trial {trial.number} carries no {error}: the study was not written by a search; use another run folder"
        ) from error


def recorded_score(trial: FrozenTrial) -> Score | None:
    """The score that a trial carries, finished or about to be."""
    value = trial.user_attrs.get(SCORE)
    return None if value is None else Score.from_json(value)


def is_searched(trial: FrozenTrial) -> bool:
    """Whether a trial is a candidate of the space, not a baseline."""
    return bool(trial.user_attrs.get(METHOD) == SEARCHED)


def violation(trial: FrozenTrial) -> float:
    """By how much a trial violates its constraints, in nats per token; 0.0 where it meets them or has none."""
    return float(max((0.0, *trial.constraints.values())))


def rank(trial: FrozenTrial) -> tuple[float, ...]:
    """The order of scored trials: those that meet all constraints first, by value, then the others by violation. Of two
    values the first counts; the second only between equal ones, so that the best trial is on the front."""
    return violation(trial), *trial.values, trial.number


def ranked(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Scored trials, best first (see `rank`), equal ones by number."""
    return sorted((trial for trial in trials if trial.state is TrialState.COMPLETE), key=rank)


def front(trials: Sequence[FrozenTrial], *, guarded: bool = True) -> list[FrozenTrial]:
    """Of the scored trials of least violation those that no other dominates, by first value; one or two objectives.

    One dominates another where it is nowhere worse, and somewhere better or as good with a lower number. So of one
    objective the front is the best trial alone. With `guarded` false, violations do not count.
    """
    ordered = ranked(trials)
    if not guarded:
        ordered.sort(key=lambda trial: (*trial.values, trial.number))
    members: list[FrozenTrial] = []
    for trial in ordered:
        if guarded and violation(trial) > violation(ordered[0]):
            break
        if not members or trial.values[-1] < members[-1].values[-1]:
            members.append(trial)
    return members
