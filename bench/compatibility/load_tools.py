"""Counts what load tools got from a server, by the files that they write themselves.

Prints one JSON object: the runs, each with its tool, the tool's version where the file says it, requests, errors, and
output tokens a second as the tool counts them. Ends with exit code 1 where a run has an error, or no request.

    python -m bench.compatibility.load_tools benchmarks.json artifacts/*/profile_export_aiperf.json vllm-*.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def guidellm_runs(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One for each rate. A request that guidellm cut short at the end of a run counts as an error."""
    for benchmark in content["benchmarks"]:
        totals = benchmark["metrics"]["request_totals"]
        yield {
            "tool": "guidellm",
            "version": content["metadata"]["guidellm_version"],
            "requests": totals["total"],
            "errors": totals["total"] - totals["successful"],
            "tokens_per_second": benchmark["metrics"]["output_tokens_per_second"]["successful"]["mean"],
        }


def aiperf_run(content: Mapping[str, Any]) -> dict[str, Any]:
    answered = int(content["request_count"]["avg"])
    errors = sum(int(error["count"]) for error in content["error_summary"])
    return {
        "tool": "AIPerf",
        "version": content["aiperf_version"],
        "requests": answered + errors,
        "errors": errors,
        "tokens_per_second": content["output_token_throughput"]["avg"],
    }


def vllm_run(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tool": f"vllm bench serve --backend {content['backend']}",
        "requests": content["num_prompts"],
        "errors": content["num_prompts"] - content["completed"],
        "tokens_per_second": content["output_throughput"],
    }


def runs(file: Path) -> list[dict[str, Any]]:
    """Of one tool's file. Raises ValueError where no tool is known that writes such a file."""
    content = json.loads(file.read_text(encoding="utf-8"))
    if "benchmarks" in content:
        return list(guidellm_runs(content))
    if "aiperf_version" in content:
        return [aiperf_run(content)]
    if "num_prompts" in content:
        return [vllm_run(content)]
    raise ValueError(f"{file}: not a result of guidellm, AIPerf or vllm bench serve")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compatibility.load_tools", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="results of guidellm, AIPerf and vllm bench serve")
    files: list[Path] = parser.parse_args(arguments).files
    try:
        found = [run for file in files for run in runs(file)]
    except (ValueError, KeyError) as error:
        parser.error(str(error))
    print(json.dumps({"runs": found}))
    return 0 if found and all(run["requests"] and not run["errors"] for run in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
