"""What workers lose to coordination: so many on one study, against as many processes that score the same on their own.

    python -m benchmarks.workers [OUT] [--num-workers 4] [--num-candidates 96] [--target-length 2048]
        [--num-repeats 3] [--storage-url URL]

Both ways the same candidates (random ones, which do not depend on each other) of the demo model are scored by as many
processes with one thread each, which wait for each other before they begin; the two ways take turns. The workers ask,
own, record and tell every trial, give signs of life and report what is best; the others only score their share, dealt
out beforehand. With --storage-url the study is on that PostgreSQL server, else in a journal. Results go to
benchmarks/results/workers.{json,md}.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from ropesearch.data.config import CorpusConfig
from ropesearch.data.windows import build_windows
from ropesearch.demo.__main__ import write_demo
from ropesearch.errors import RopesearchError
from ropesearch.files import write_bytes, write_json
from ropesearch.model.config import ModelConfig
from ropesearch.model.load import load_model
from ropesearch.run_folder import versions
from ropesearch.score.config import ScoringConfig
from ropesearch.score.objective import Objective
from ropesearch.score.scorer import forward_equivalent_tokens
from ropesearch.score.store import ScoreStore
from ropesearch.scoring import JobScorer
from ropesearch.search.baselines import baseline_regimes
from ropesearch.search.config import BudgetConfig, RacingConfig, RandomConfig, SelectionConfig, SpaceConfig
from ropesearch.search.optimizers import make_sampler
from ropesearch.search.presence import working
from ropesearch.search.run import run_search
from ropesearch.search.sharing_config import JournalConfig, PostgresqlConfig, WorkerConfig
from ropesearch.search.spaces import make_space
from ropesearch.search.study import open_study

RESULTS = Path(__file__).parent / "results"
WAYS = ("together", "alone")


def work(options: argparse.Namespace) -> None:
    """One process: load, say so, wait for the start, work; then leave when it began and ended."""
    import torch

    out, target_length, url = options.out, options.target_length, options.storage_url
    run = out / options.way
    torch.set_num_threads(1)
    config = ModelConfig(path=str(out / "demo" / "model"))
    scorer = JobScorer(
        load=lambda: load_model(config), identity=lambda windows, scoring: {}, store=ScoreStore(run / "scores")
    )
    loaded, scoring = scorer.loaded, ScoringConfig()
    corpus = CorpusConfig(path=str(out / "demo" / "texts"))
    windows = build_windows(corpus, loaded.tokenizer, target_length, 0, None)["search"]
    baselines = baseline_regimes(loaded.geometry, target_length)
    space = make_space(loaded.geometry, target_length, SpaceConfig())
    num_windows = windows.num_windows
    sampler = make_sampler(space, RandomConfig(), 0, [], len(baselines), num_windows, Objective(), RacingConfig())
    regimes = [*baselines]
    for number in range(len(baselines), len(baselines) + options.num_candidates):
        regimes.append(space.regime(sampler.propose([], number)))
    opened = open_study(run, {}, sampler, storage=PostgresqlConfig(url=url) if url else JournalConfig())
    ended: list[float] = []
    (run / f"ready-{options.place}").touch()
    while not (run / "start").exists():
        time.sleep(0.005)
    begun = time.monotonic()
    if options.way == "alone":
        for regime in regimes[options.place :: options.num_workers]:
            scorer.score(regime, windows, scoring)
        ended.append(time.monotonic())
    else:
        with working(run, WorkerConfig().lease_seconds) as presence:
            run_search(
                opened,
                sampler,
                lambda regime, split: scorer.score(regime, windows, scoring),
                baselines=baselines,
                cost_tokens=forward_equivalent_tokens(windows),
                budget=BudgetConfig(num_trials=options.num_candidates),
                selection=SelectionConfig(num_finalists=1),
                presence=presence,
                objective=Objective(),
                on_event=lambda event: ended.append(time.monotonic()) if event.split == "search" else None,
            )
    opened.store.close()
    write_json(run / f"times-{options.place}.json", {"begun": begun, "ended": ended[-1]})


def measured(out: Path, options: argparse.Namespace, way: str) -> float:
    """Seconds from the first begin to the end of the last trial."""
    run = out / way
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    numbers = range(options.num_workers)
    common = [str(out)]
    for name in ("num-workers", "num-candidates", "target-length"):
        common += [f"--{name}", str(getattr(options, name.replace("-", "_")))]
    common += ["--storage-url", options.storage_url] if options.storage_url else []
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.workers", *common, "--way", way, "--place", str(place)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
        )
        for place in numbers
    ]
    try:
        while not all((run / f"ready-{place}").exists() for place in numbers):
            if any(process.poll() not in (None, 0) for process in processes):
                raise RopesearchError(f"a process of the way {way!r} ended before it began")
            time.sleep(0.05)
        (run / "start").touch()
        if any(process.wait() for process in processes):
            raise RopesearchError(f"a process of the way {way!r} failed")
    finally:
        for process in processes:
            process.kill()
    times = [json.loads((run / f"times-{place}.json").read_bytes()) for place in numbers]
    return float(max(each["ended"] for each in times) - min(each["begun"] for each in times))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="What workers of one study lose to coordination.")
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/workers"), metavar="OUT")
    parser.add_argument("--num-workers", type=int, default=4)
    parser.add_argument("--num-candidates", type=int, default=96)
    parser.add_argument("--target-length", type=int, default=2048, help="the shorter, the less a candidate takes")
    parser.add_argument("--num-repeats", type=int, default=3)
    parser.add_argument("--storage-url", help="a PostgreSQL server instead of a journal")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        work(options)
        return 0
    try:
        write_demo(options.out / "demo")
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.num_repeats):
            for way in WAYS:
                seconds[way].append(measured(options.out, options, way))
                print(f"{way}: {seconds[way][-1]:.1f} s", flush=True)
    except RopesearchError as error:
        print(f"workers: {error}", file=sys.stderr)
        return error.exit_code
    ratios = [together / alone for together, alone in zip(*(seconds[way] for way in WAYS), strict=True)]
    storage = "postgresql" if options.storage_url else "journal"
    path = RESULTS / "workers.json"
    results = json.loads(path.read_bytes()) if path.exists() else {}
    results[f"{storage}, {options.target_length} tokens"] = {
        "storage": storage,
        "target_length": options.target_length,
        "num_workers": options.num_workers,
        "num_cpus": os.cpu_count(),
        "num_candidates": options.num_candidates,
        "seconds": seconds,
        "ratios": ratios,
        "versions": versions(),
    }
    write_json(path, results)
    lines = [
        "| storage | target_length | workers | candidates | core-seconds for each | together / alone, median (range) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for _, found in sorted(results.items()):
        middle, spread = statistics.median(found["ratios"]), (min(found["ratios"]), max(found["ratios"]))
        num_cores = min(found["num_cpus"], found["num_workers"])
        cells = (
            found["storage"],
            found["target_length"],
            found["num_workers"],
            found["num_candidates"],
            f"{statistics.median(found['seconds']['alone']) * num_cores / found['num_candidates']:.2f}",
            f"{middle:.3f} ({spread[0]:.3f} to {spread[1]:.3f})",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    write_bytes(RESULTS / "workers.md", ("\n".join(lines) + "\n").encode())
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
