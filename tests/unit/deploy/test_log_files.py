"""Logs are found by what wrote them."""

from __future__ import annotations

from pathlib import Path

from spool.deploy.cli.logs import log_files


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_replicas_of_the_application_are_found_in_the_folder_of_ray(tmp_path: Path) -> None:
    for number, actor in ((1, "ServeReplica:mine:TargetWorker"), (2, "ServeReplica:mine:Gateway")):
        write(tmp_path / f"worker-ab{number}-02-{number}7.err", ":job_id:02", f":actor_name:{actor}", f"I am {actor}")
        write(tmp_path / f"worker-ab{number}-02-{number}7.out", f":actor_name:{actor}")
    write(tmp_path / "worker-ab3-02-37.err", ":job_id:02", ":actor_name:ServeReplica:not-mine:Gateway")
    write(tmp_path / "worker-ab4-ff-47.err", ":job_id:02", ":actor_name:ServeController")
    write(tmp_path / "worker-ab5-ff-57.err", "says :actor_name:ServeReplica:mine:Gateway")
    write(tmp_path / "raylet.err", ":actor_name:ServeReplica:mine:Gateway")
    found = log_files(tmp_path, "mine", ray=True)
    assert list(found) == ["Gateway-27", "TargetWorker-17"]
    assert found["TargetWorker-17"].read_text().endswith("I am ServeReplica:mine:TargetWorker\n")
