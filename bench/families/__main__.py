"""Tries all families, or those that are named, and prints what became of them as JSON on the last line.

    python -m bench.record families -- python -m bench.families

A family is a model type of transformers that has a causal language model.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict

from rich.progress import track
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from bench.families.trial import Verdict, try_family
from deploy.progress import error_console


def main(arguments: Sequence[str]) -> int:
    """1 where a family would be served wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.families", description=__doc__)
    parser.add_argument("family", nargs="*", help="default: all")
    asked = parser.parse_args(arguments)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    families = asked.family or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    unknown = sorted(set(families) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    if unknown:
        parser.error(f"transformers {transformers_version} has no causal language model of type {', '.join(unknown)}")
    tried = [try_family(family) for family in track(families, "families", console=error_console())]
    rows = [asdict(trial) | {"verdict": trial.verdict.value} for trial in tried]
    print(json.dumps({"transformers": transformers_version, "families": rows}))
    return 1 if any(trial.verdict is Verdict.WRONG for trial in tried) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
