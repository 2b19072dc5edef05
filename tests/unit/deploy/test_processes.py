"""What a cell without Ray is made of: numbers of schedulers in a folder, workers and their devices."""

from __future__ import annotations

import pytest

from spool.deploy.config.loading import load_configuration
from spool.deploy.offline.cell import worker_launches
from spool.deploy.workers import cell_workers
from spool.scheduler.messages import Role


def devices(monkeypatch: pytest.MonkeyPatch, gpus: int, *overrides: str) -> dict[str, str]:
    monkeypatch.setattr("spool.deploy.workers.count_gpus", lambda device: gpus)
    monkeypatch.setattr("spool.deploy.workers.worker_memory", lambda engine, role: {"role": role})
    planned = cell_workers(load_configuration(None, overrides))
    found = {worker.name: str(worker.settings.get("device", "none")) for worker in planned}
    for worker in planned:
        device = found[worker.name]
        here = [one for one in planned if found[one.name] == device.replace("cpu", "") and one != worker]
        inside = worker.settings.get("inside_draft")
        own = [] if inside is None or device == "cpu" else [Role.DRAFT]
        peers = [*own, *(role for one in here for role in (one.role, *(own if one.role is worker.role else ())))]
        assert [peer["role"] for peer in worker.settings.get("gpu_peers", ())] == peers
        if own:
            of_draft = [peer["role"] for peer in inside["gpu_peers"]]
            assert (inside["device"], of_draft) == (device, [Role.TARGET, *peers[1:]])
    return found


def test_workers_are_spread_over_the_gpus_targets_first(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = "models.draft_in=workers"
    assert devices(monkeypatch, 0, workers) == {"target-0": "cpu", "draft-0": "cpu"}
    assert devices(monkeypatch, 1, workers) == {"target-0": "cuda:0", "draft-0": "cuda:0"}
    two = devices(monkeypatch, 3, "groups.target.replicas=2")
    assert two == {"target-0": "cuda:0", "target-1": "cuda:1", "draft-0": "cuda:2"}
    assert devices(monkeypatch, 2, workers, "models.device=cpu") == {"target-0": "cpu", "draft-0": "cpu"}
    assert devices(monkeypatch, 2, "groups.draft.num_gpus=0") == {"target-0": "cuda:0", "draft-0": "cpu"}
    ranks = devices(monkeypatch, 3, "engine.tensor_parallel_size=2")
    assert ranks == {"target-0": "cuda:0", "draft-0": "cuda:2"}
    for draft in ("ngram", "none"):
        assert devices(monkeypatch, 2, workers, f"models.draft={draft}") == {"target-0": "cuda:0"}


def test_a_pair_on_one_device_is_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a draft with GPUs or CPUs of its own there are draft workers, as there are where the file asks for some."""
    assert devices(monkeypatch, 0) == {"target-0": "cpu"}
    assert devices(monkeypatch, 1) == {"target-0": "cuda:0"}
    assert devices(monkeypatch, 2) == {"target-0": "cuda:0", "draft-0": "cuda:1"}
    assert devices(monkeypatch, 2, "models.draft_in=targets") == {"target-0": "cuda:0"}
    assert devices(monkeypatch, 2, "models.device=cpu") == {"target-0": "cpu"}
    two = dict.fromkeys(("target-0", "target-1"), "cuda:0")
    assert devices(monkeypatch, 1, "groups.target.replicas=2") == two
    assert devices(monkeypatch, 2, "groups.target.replicas=2") == {"target-0": "cuda:0", "target-1": "cuda:1"}
    assert devices(monkeypatch, 2, "engine.tensor_parallel_size=2", "models.draft=ngram") == {"target-0": "cuda:0"}
    for placed in ("replicas=2", "num_gpus=0", "num_cpus=1", "resources={a: 1}", "autoscaling.max_replicas=2"):
        assert "draft-0" in devices(monkeypatch, 0, f"groups.draft.{placed}")
    # Of a draft inside, too, these say how much it takes.
    for other in ("threads=2", "kv_memory=1MiB"):
        assert "draft-0" not in devices(monkeypatch, 0, f"groups.draft.{other}")
    # A draft model does not run beside a part of a target.
    assert "draft-0" in devices(monkeypatch, 0, "engine.tensor_parallel_size=2")


@pytest.mark.parametrize(
    ("models", "of_target", "of_draft"),
    [
        ("draft: ngram", 2, None),
        ("draft: ngram, draft_in: workers", 2, None),
        ("draft: none", None, None),
        ("draft: demo", 2, None),
        ("draft_lookup: 5", 5, None),
        ("draft_lookup: 0", None, None),
        ("draft: mtp, draft_kind: head, draft_lookup: 3", 3, None),
        ("draft_in: workers, draft_lookup: 5", None, 5),
    ],
)
def test_who_looks_up_prompts(models: str, of_target: int | None, of_draft: int | None) -> None:
    config = load_configuration(None, [f"models={{device: cpu, {models}}}"])
    for planned in (cell_workers(config), worker_launches(config, [40])):
        found = {worker.role: worker.settings["lookup_match"] for worker in planned}
        assert (found[Role.TARGET], found.get(Role.DRAFT)) == (of_target, of_draft)
        inside = [worker.settings["inside_draft"] for worker in planned if worker.settings["inside_draft"]]
        assert all(one["lookup_match"] is None for one in inside)
