"""What a cell without Ray is made of: numbers of schedulers in a folder, workers and their devices."""

from __future__ import annotations

import pytest

from deploy.config.loading import load_configuration
from deploy.workers import cell_workers
from scheduler.messages import Role


def devices(monkeypatch: pytest.MonkeyPatch, gpus: int, *overrides: str) -> dict[str, str]:
    monkeypatch.setattr("deploy.workers.count_gpus", lambda device: gpus)
    monkeypatch.setattr("deploy.workers.worker_memory", lambda engine, role: {"role": role})
    planned = cell_workers(load_configuration(None, overrides))
    found = {worker.name: str(worker.settings.get("device", "none")) for worker in planned}
    for worker in planned:
        device = found[worker.name]
        here = [one for one in planned if found[one.name] == device.replace("cpu", "") and one != worker]
        inside = worker.settings.get("inside_draft")
        own = [] if inside is None or device == "cpu" or inside["model"] == "ngram" else [Role.DRAFT]
        peers = [*own, *(role for one in here for role in (one.role, *(own if one.role is worker.role else ())))]
        assert [peer["role"] for peer in worker.settings.get("gpu_peers", ())] == peers
        if own:
            of_draft = [peer["role"] for peer in inside["gpu_peers"]]
            assert (inside["device"], of_draft) == (device, [Role.TARGET, *peers[1:]])
    return found


def test_workers_are_spread_over_the_gpus_targets_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices(monkeypatch, 0) == {"target-0": "cpu", "draft-0": "cpu"}
    assert devices(monkeypatch, 1) == {"target-0": "cuda:0", "draft-0": "cuda:0"}
    two = devices(monkeypatch, 3, "groups.target.replicas=2")
    assert two == {"target-0": "cuda:0", "target-1": "cuda:1", "draft-0": "cuda:2"}
    assert devices(monkeypatch, 2, "models.device=cpu") == {"target-0": "cpu", "draft-0": "cpu"}
    assert devices(monkeypatch, 2, "groups.draft.num_gpus=0") == {"target-0": "cuda:0", "draft-0": "cpu"}
    ranks = devices(monkeypatch, 3, "engine.tensor_parallel_size=2")
    assert ranks == {"target-0": "cuda:0", "draft-0": "cuda:2"}
    assert devices(monkeypatch, 2, "models.draft=ngram") == {"target-0": "cuda:0", "draft-0": "none"}
    assert devices(monkeypatch, 2, "models.draft=none") == {"target-0": "cuda:0"}
    inside = "models.draft_in=targets"
    assert devices(monkeypatch, 0, inside) == devices(monkeypatch, 0, inside, "models.draft=ngram")
    assert devices(monkeypatch, 1, inside) == devices(monkeypatch, 1, inside, "models.draft=ngram")
    assert devices(monkeypatch, 1, inside, "groups.target.replicas=2") == dict.fromkeys(
        ("target-0", "target-1"), "cuda:0"
    )
