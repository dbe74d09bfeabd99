"""ropesearch/train/spikes.py: what is a spike and what is not, also after going on."""

import numpy as np

from ropesearch.train.spikes import SpikeWatch


def test_a_jump_is_said_and_noise_and_descent_are_not() -> None:
    watch = SpikeWatch()
    rng = np.random.default_rng(0)
    losses = 3.0 + np.exp(-np.arange(200) / 20) + rng.normal(0, 0.03, 200)
    assert [watch.seen(step, float(loss)) for step, loss in enumerate(losses)] == [None] * 200
    said = watch.seen(200, 4.2)
    assert said is not None and said.startswith("step 200: a loss of 4.200 nats per token, far above the 2.99")
    assert watch.seen(201, 3.02) is None


def test_in_the_first_steps_only_a_jump_beyond_what_documents_differ_by_is_said() -> None:
    watch = SpikeWatch()
    assert [watch.seen(step, loss) for step, loss in enumerate([3.0, 4.5, 2.6, 4.9])] == [None] * 4
    for losses in ([3.02, 9.99], [3.0, 54.0, 204.0], [3.0, 3.1, 2.9, 6.0]):
        watch = SpikeWatch()
        said = [watch.seen(step + 1, loss) for step, loss in enumerate(losses)]
        assert any(said) and said[0] is None, losses
    assert SpikeWatch().seen(1, 99.0) is None  # nothing to compare with


def test_what_was_seen_before_a_stop_is_recalled() -> None:
    whole, resumed = SpikeWatch(), SpikeWatch()
    for step in range(30):
        loss = 3.0 + 0.01 * (step % 5)
        assert whole.seen(step, loss) is None
        event = {"regimes": {"0": "short", "1": "long"}, "tokens": {"0": 10, "1": 20}}
        resumed.recall({**event, "nats": {"0": 99.0, "1": 20 * loss}})
    assert whole.seen(30, 5.0) == resumed.seen(30, 5.0) is not None
