"""What a search costs: search and held-out nats per token against forward-equivalent tokens, for every optimizer.

    python -m benchmarks.search_cost [OUT] [--only TEXT] [--second-model FOLDER]

Every run is a search of its own in OUT (by default runs/search_cost), with the same space, windows and baselines for
all optimizers. The default races, as it does in a job; the reference is also run raced, to as many candidates as it has
without, to see what that saves and what it costs. More seeds of both are run for their first evaluations alone, to
compare them at equal cost while little is spent. Stopped and started again it goes on where it was; started twice, the
two share the work. --only takes the runs whose name holds TEXT. The second model is trained by
benchmarks/second_model.py; without it its runs are left out. At the end benchmarks/results/search_cost.{json,md,png}
are written anew, of all runs that are there.

A run's cost is counted in evaluations: forward-equivalent tokens over those of one scoring of the search windows.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from optuna.trial import TrialState

from ropesearch.config import plain
from ropesearch.data.config import CorpusConfig
from ropesearch.data.windows import Windows, build_windows
from ropesearch.demo.__main__ import write_demo
from ropesearch.errors import RopesearchError
from ropesearch.files import write_bytes, write_json
from ropesearch.model.config import ModelConfig
from ropesearch.model.load import load_model
from ropesearch.run_folder import versions
from ropesearch.score.config import ScoringConfig
from ropesearch.score.gradient import GRADIENT_COST
from ropesearch.score.objective import Objective
from ropesearch.score.scorer import forward_equivalent_tokens, scoring_identity
from ropesearch.score.store import ScoreStore
from ropesearch.scoring import JobScorer
from ropesearch.search.baselines import baseline_regimes, seed_regimes
from ropesearch.search.config import (
    OPTIMIZERS,
    BudgetConfig,
    GradientConfig,
    OptimizerConfig,
    RacingConfig,
    RacingMark,
    SelectionConfig,
    SpaceConfig,
)
from ropesearch.search.optimizers import make_sampler
from ropesearch.search.ownership import claimed
from ropesearch.search.presence import working
from ropesearch.search.racing import Racing, race_rule
from ropesearch.search.run import run_search
from ropesearch.search.sharing_config import WorkerConfig
from ropesearch.search.spaces import make_space
from ropesearch.search.study import open_study
from ropesearch.search.trials import COST, METHOD, SECONDS, recorded_regime

RESULTS = Path(__file__).parent / "results"
DEFAULT = "gradient"
REFERENCE = "evolution"
SHORT, FULL = 400, 1344  # evaluations of the reference that the default is held against
LONG, COMPARED = 200, 100  # evaluations of the default beside the reference's full run, and elsewhere
OTHERS = 48  # evaluations of all other optimizers
EARLY = 20  # evaluations of the default and the reference at the beginning, for more seeds
RACED = f"{REFERENCE}, raced"
RACED_CASES, RACED_SEEDS = ("ratio-4", "ratio-8"), 2
# Costs, in evaluations, at which the best so far is scored on the held-out windows.
MARKS = (4, 5, 7, 9, 11, 14, 16, 20, 24, 28, 34, 40, 50, 64, 80, 100, 140, 200, 280, 400, 560, 800, 1100, FULL + 8)
EARLY_MARKS = tuple(quarter / 4 for quarter in range(4 * 4, 4 * (EARLY + 4) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and a target length; `num_seeds` searches of each optimizer, and more early ones of two of them."""

    name: str
    model: str
    target_length: int
    num_seeds: int
    full: bool = True
    num_windows: int = 16
    num_early_seeds: int = 5


CASES = (
    Case(name="ratio-4", model="demo", target_length=1024, num_seeds=2),
    Case(name="ratio-8", model="demo", target_length=2048, num_seeds=5),
    Case(name="second-ratio-8", model="second", target_length=1024, num_seeds=2, full=False),
    # As many tokens as at ratio 8. Early searches scatter more with so few windows.
    Case(name="ratio-16", model="demo", target_length=4096, num_seeds=2, num_windows=8, num_early_seeds=10),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One search: its optimizer and seed, and how many evaluations it may cost besides the four baselines; the raced
    reference has as many candidates instead. Early ones are held out at more costs.
    """

    case: Case
    optimizer: str
    seed: int
    num_evaluations: int
    is_raced: bool = False
    is_early: bool = False

    @property
    def name(self) -> str:
        early = "-early" if self.is_early else ""
        return f"{self.case.name}-{self.label.replace(', ', '-')}-{self.seed}{early}"

    @property
    def marks(self) -> Sequence[float]:
        """The costs at which the best so far is scored on the held-out windows."""
        return EARLY_MARKS if self.is_early else MARKS

    @property
    def label(self) -> str:
        """The optimizer as tables and plots name it."""
        return RACED if self.is_raced and self.optimizer == REFERENCE else self.optimizer


def all_runs() -> Iterator[Run]:
    """The default and the reference of all cases first."""
    for case in CASES:
        for seed in range(case.num_seeds):
            full = seed == 0 and case.full
            num_evaluations = LONG if full else COMPARED
            yield Run(case=case, optimizer=DEFAULT, seed=seed, num_evaluations=num_evaluations, is_raced=True)
            yield Run(case=case, optimizer=REFERENCE, seed=seed, num_evaluations=FULL if full else SHORT)
    for case in CASES:
        for seed in range(case.num_early_seeds):
            for optimizer in (DEFAULT, REFERENCE):
                is_raced = optimizer == DEFAULT
                yield Run(
                    case=case, optimizer=optimizer, seed=seed, num_evaluations=EARLY, is_raced=is_raced, is_early=True
                )
    for case in CASES:
        for seed in range(RACED_SEEDS if case.name in RACED_CASES else 0):
            yield Run(case=case, optimizer=REFERENCE, seed=seed, num_evaluations=SHORT, is_raced=True)
    for case in CASES:
        for seed in range(case.num_seeds):
            for optimizer in OPTIMIZERS:
                if optimizer not in (DEFAULT, REFERENCE):
                    yield Run(case=case, optimizer=optimizer, seed=seed, num_evaluations=OTHERS)


class Bench:
    """A case's model and windows, loaded when they are needed."""

    def __init__(self, folder: Path, case: Case, scores: Path) -> None:
        self.case = case
        config = ModelConfig(path=str(folder / "model"))
        self.scorer = JobScorer(
            load=lambda: load_model(config),
            identity=lambda windows, scoring: {"model": case.model, **scoring_identity(config, windows, scoring)},
            store=ScoreStore(scores),
        )
        corpus = CorpusConfig(path=str(folder / "texts"), num_search_windows=case.num_windows)
        tokenizer = self.scorer.loaded.tokenizer
        self.windows: dict[str, Windows] = build_windows(corpus, tokenizer, case.target_length, 0, None)

    def search(self, out: Path, run: Run) -> dict[str, Any]:
        """The finished run: its curve, as JSON values."""
        geometry, target_length = self.scorer.loaded.geometry, self.case.target_length
        baselines = baseline_regimes(geometry, target_length)
        space = make_space(geometry, target_length, SpaceConfig())
        windows = self.windows["search"]
        config: OptimizerConfig = OPTIMIZERS[run.optimizer]()
        if isinstance(config, GradientConfig):
            config.num_candidates = 100_000  # the budget ends it
        objective, scoring = Objective(), ScoringConfig()
        seeds = seed_regimes(baselines)
        raced = RacingConfig(mark=RacingMark.finalists if run.is_raced else RacingMark.none)
        sampler = make_sampler(space, config, run.seed, seeds, len(baselines), windows.num_windows, objective, raced)
        cost_tokens = forward_equivalent_tokens(windows)
        selection = SelectionConfig() if run.label == RACED else SelectionConfig(num_finalists=1)
        rule = race_rule(raced, selection, sampler, objective, windows.num_windows)
        racing = None
        if rule is not None:
            racing = Racing(
                evaluate=lambda regime, window: self.scorer.score(regime, windows, scoring, only=window),
                num_windows=windows.num_windows,
                window_cost_tokens=cost_tokens // windows.num_windows,
                objective=objective,
                rule=rule,
            )
        num_evaluations = run.num_evaluations + len(baselines)
        fingerprints = {
            "windows": {split: self.windows[split].fingerprint for split in self.windows},
            "optimizer": {"name": run.optimizer, **plain(config)},
            "seed": run.seed,
        }
        opened = open_study(out, fingerprints, sampler)
        with working(out, WorkerConfig().lease_seconds) as presence:
            run_search(
                opened,
                sampler,
                lambda regime, split: self.scorer.score(regime, self.windows[split], scoring),
                differentiate=lambda regime, window, guard_weight: self.scorer.differentiate(
                    regime, windows, window, objective, guard_weight
                ),
                racing=racing,
                baselines=baselines,
                cost_tokens=cost_tokens,
                step_cost_tokens=GRADIENT_COST * target_length,
                budget=BudgetConfig(num_trials=num_evaluations)
                if run.label == RACED
                else BudgetConfig(forward_equivalent_tokens=num_evaluations * cost_tokens),
                selection=selection,
                presence=presence,
            )
        trials = opened.trials()
        curve: list[dict[str, float]] = []
        spent_tokens, seconds, best, held_out = 0, 0.0, math.inf, math.nan
        marks, due, regime = run.marks, 0, None
        for trial in trials:
            spent_tokens += trial.user_attrs.get(COST, 0)
            seconds += trial.user_attrs.get(SECONDS, 0.0)
            if trial.state is TrialState.COMPLETE and trial.values[0] < best:
                best, regime, held_out = trial.values[0], recorded_regime(trial, target_length), math.nan
            cost = spent_tokens / cost_tokens
            last = trial is trials[-1]
            if regime is not None and trial.number >= len(baselines) - 1 and (cost >= marks[due] or last):
                due = next((index for index, mark in enumerate(marks) if mark > cost), len(marks) - 1)
                if math.isnan(held_out):
                    held_out = self.scorer.kept(regime, self.windows["held_out"], scoring).nats_per_token
                curve.append({"evaluations": cost, "seconds": seconds, "search": best, "held_out": held_out})
        course, spent_tokens, best = [], 0, math.inf
        for trial in trials:
            spent_tokens += trial.user_attrs.get(COST, 0)
            if trial.state is TrialState.COMPLETE and trial.values[0] < best:
                best = trial.values[0]
                course.append([spent_tokens / cost_tokens, best])
        baseline_nats = {
            trial.user_attrs[METHOD]: trial.values[0] for trial in trials[: len(baselines)] if trial.values
        }
        return {
            "run": run.name,
            "case": run.case.name,
            "optimizer": run.label,
            "seed": run.seed,
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "baselines": baseline_nats,
            "curve": curve,
            "course": course,
        }


def cost_to_reach(course: Sequence[Sequence[float]], nats: float) -> float:
    """Evaluations after which the best is no worse than `nats`; infinity where it never is."""
    return next((cost for cost, best in course if best <= nats), math.inf)


def after(course: Sequence[Sequence[float]], evaluations: float) -> float:
    """The best after so many evaluations."""
    return min((best for cost, best in course if cost <= evaluations), default=math.inf)


def comparisons(results: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """For every case and seed: what the reference has after SHORT and FULL, and what that costs the others."""
    found = []
    for reference in (result for result in results.values() if result["optimizer"] == REFERENCE):
        num_baselines = len(reference["baselines"])
        for evaluations in (SHORT, FULL):
            if reference["course"] and reference["curve"][-1]["evaluations"] < evaluations - 8:
                continue
            nats = after(reference["course"], evaluations + num_baselines)
            costs = {
                result["optimizer"]: cost_to_reach(result["course"], nats)
                for result in results.values()
                if (result["case"], result["seed"]) == (reference["case"], reference["seed"])
                and result["optimizer"] != REFERENCE
            }
            found.append(
                {
                    "case": reference["case"],
                    "seed": reference["seed"],
                    "evaluations": evaluations,
                    "nats": nats,
                    "costs": {name: None if math.isinf(cost) else cost for name, cost in costs.items()},
                }
            )
    return found


def racing_lines(results: Mapping[str, dict[str, Any]]) -> list[str]:
    """What racing saves of the reference's tokens, and where both end."""
    lines = [
        f"Racing of {SHORT} candidates against the last finalist, final nats per token on search / held-out windows:",
        "",
        "| case | seed | evaluations | saved | raced | not raced |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for raced in (result for result in results.values() if result["optimizer"] == RACED):
        plain_run = results.get(f"{raced['case']}-{REFERENCE}-{raced['seed']}")
        if plain_run is None:
            continue
        num_evaluations = SHORT + len(raced["baselines"])
        end = raced["curve"][-1]
        plain_end = [point for point in plain_run["curve"] if point["evaluations"] <= num_evaluations][-1]
        saved = 1 - end["evaluations"] / num_evaluations
        both = (f"{point['search']:.4f} / {point['held_out']:.4f}" for point in (end, plain_end))
        cells = (raced["case"], raced["seed"], f"{end['evaluations']:.0f}", f"{saved:.0%}", *both)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def held_out_at(result: Mapping[str, Any], evaluations: float) -> float:
    """Nats per token on the held-out windows of the best after so many evaluations."""
    return [point["held_out"] for point in result["curve"] if point["evaluations"] <= evaluations][-1]


def at_equal_cost(whole: Mapping[str, dict[str, Any]], early: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """For every case: what the default is above the reference on held-out windows at equal cost, seed by seed; at the
    beginning of many searches, and later of those that go on.
    """
    found = []
    for results, marks in ((early, EARLY_MARKS), (whole, [mark for mark in MARKS if mark > EARLY_MARKS[-1]])):
        for case in CASES:
            pairs = [
                (default, reference)
                for default in results.values()
                for reference in results.values()
                if default["case"] == reference["case"] == case.name
                and default["seed"] == reference["seed"]
                and (default["optimizer"], reference["optimizer"]) == (DEFAULT, REFERENCE)
            ]
            for mark in marks:
                above = [
                    held_out_at(default, mark) - held_out_at(reference, mark)
                    for default, reference in pairs
                    if default["curve"][-1]["evaluations"] > mark - 1  # else it has ended before
                ]
                if above:
                    found.append({"case": case.name, "evaluations": mark, "above": above})
    return found


def equal_cost_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the default is above the reference at equal cost."""
    shown = (5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 40, 100, 200)
    lines = [
        "The default's held-out nats per token less the evolution's after as many evaluations, in units of 0.0001, "
        "median (range; number of seeds):",
        "",
        f"| case | {' | '.join(map(str, shown))} | highest median |",
        "|---|" + "---:|" * (len(shown) + 1),
    ]
    for case in CASES:
        mine = [row for row in rows if row["case"] == case.name]
        if not mine:
            continue
        cells = []
        for mark in shown:
            above = [1e4 * value for row in mine if row["evaluations"] == mark for value in row["above"]]
            spread = f" ({min(above):.0f} to {max(above):.0f}; {len(above)})" if above else ""
            cells.append(f"{statistics.median(above):.0f}{spread}" if above else "")
        highest = max(mine, key=lambda row: statistics.median(row["above"]))
        worst = f"{1e4 * statistics.median(highest['above']):.0f} at {highest['evaluations']:g}"
        lines.append(f"| {case.name} | {' | '.join(cells)} | {worst} |")
    return lines


def table(results: Mapping[str, dict[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
    """The figures as markdown."""
    lines = [
        "| case | seed | evolution's evaluations | its perplexity | reached by the default after | that is |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in comparisons(results):
        if DEFAULT not in row["costs"]:
            continue  # not run yet
        cost = row["costs"][DEFAULT]
        reached = "not within its run" if cost is None else f"{cost:.1f}"
        share = "" if cost is None else f"1 / {row['evaluations'] / cost:.0f}"
        cells = (row["case"], row["seed"], row["evaluations"], f"{math.exp(row['nats']):.3f}", reached, share)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", *equal_cost_lines(rows), "", *racing_lines(results)]
    lines += ["", "Perplexity on search / held-out windows after so many evaluations, median over seeds:", ""]
    marks = (5, 9, 14, 20, 40, 100, 200, SHORT, FULL)
    lines += [f"| case | optimizer | {' | '.join(map(str, marks))} |", "|---|---|" + "---:|" * len(marks)]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results.values():
        groups.setdefault((result["case"], result["optimizer"]), []).append(result)
    for (case, optimizer), group in groups.items():
        medians = []
        for mark in marks:
            points = [
                [point for point in result["curve"] if point["evaluations"] <= mark + 4]
                for result in group
                if result["curve"][-1]["evaluations"] >= mark - 8
            ]
            last = [each[-1] for each in points if each]
            pairs = (statistics.median(math.exp(point[split]) for point in last) for split in ("search", "held_out"))
            medians.append(" / ".join(f"{value:.2f}" for value in pairs) if last else "")
        lines.append(f"| {case} | {optimizer} ({len(group)}) | {' | '.join(medians)} |")
    return "\n".join(lines) + "\n"


def plot(path: Path, results: Mapping[str, dict[str, Any]]) -> None:
    """Held-out and search perplexity against cost, a row for each case."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(result["case"] for result in results.values()))
    figure = Figure(figsize=(11, 3.2 * len(cases)), layout="constrained")
    axes = figure.subplots(len(cases), 2, squeeze=False)
    colours = {name: f"C{index}" for index, name in enumerate([*OPTIMIZERS, RACED])}
    for row, case in zip(axes, cases, strict=True):
        for axis, split in zip(row, ("search", "held_out"), strict=True):
            seen = set()
            for result in results.values():
                if result["case"] != case:
                    continue
                name = result["optimizer"]
                axis.step(
                    [point["evaluations"] for point in result["curve"]],
                    [math.exp(point[split]) for point in result["curve"]],
                    where="post",
                    color=colours[name],
                    linewidth=1,
                    label=None if name in seen else name,
                )
                seen.add(name)
            axis.set_xscale("log")
            axis.set_title(f"{case}, {split.replace('_', '-')} windows", fontsize=9)
            axis.set_xlabel("evaluations")
            axis.set_ylabel("perplexity")
        row[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="What a search costs, for every optimizer.")
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/search_cost"), metavar="OUT")
    parser.add_argument("--only", default="", metavar="TEXT", help="the runs whose name holds TEXT")
    parser.add_argument("--second-model", type=Path, metavar="FOLDER", help="of benchmarks/second_model.py")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        write_demo(options.out / "demo")
        folders = {"demo": options.out / "demo", "second": options.second_model}
        asked = [run for run in all_runs() if options.only in run.name and folders[run.case.model] is not None]
        benches: dict[str, Bench] = {}
        for run in asked:
            kept = options.out / f"{run.name}.json"
            with claimed(options.out / f"{run.name}.lock") as mine:
                if not mine or kept.exists():
                    continue
                if run.case.name not in benches:
                    benches = {run.case.name: Bench(folders[run.case.model], run.case, options.out / "scores")}
                write_json(kept, benches[run.case.name].search(options.out / run.name, run))
                print(f"{run.name} is done", flush=True)
        kept = {run: options.out / f"{run.name}.json" for run in all_runs()}
        found = {run: json.loads(path.read_bytes()) for run, path in kept.items() if path.exists()}
    except RopesearchError as error:
        print(f"search_cost: {error}", file=sys.stderr)
        return error.exit_code
    whole, early = ({run.name: of for run, of in found.items() if run.is_early is each} for each in (False, True))
    rows = at_equal_cost(whole, early)
    values = {"comparisons": comparisons(whole), "at_equal_cost": rows, "results": whole, "early": early}
    write_json(RESULTS / "search_cost.json", values)
    write_bytes(RESULTS / "search_cost.md", table(whole, rows).encode())
    if whole:
        plot(RESULTS / "search_cost.png", whole)
    print(table(whole, rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
