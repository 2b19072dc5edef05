"""Answers to words that the command line does not know: earlier names, other servers' names, fields of the file."""

from __future__ import annotations

import difflib

from typer.exceptions import TyperException

from deploy.cli.field_options import FIELDS
from deploy.config.field_documents import documents
from deploy.config.spool_config import SpoolConfig

RENAMED_OPTIONS: dict[str, str] = {"--window": "--max-running", "--window-batches": "--max-running-batches"}
"""Options of earlier versions and their present names, as in `"--old-name": "--new-name"`."""

_MODEL = "the first argument, as in `spool {command} MODEL`"
_OFFLINE = {
    "--target": _MODEL,
    "--target-workers": "--target-replicas",
    "--draft-workers": "--draft-replicas",
}

MOVED: dict[str, dict[str, str]] = {
    "generate": _OFFLINE,
    "verify": _OFFLINE,
    "serve": {"--target": _MODEL},
    "config": {
        "--check": "`spool config check FILE`",
        "--explain": "`spool config explain`",
        "--example": "`spool config show --defaults`",
        "--reference": "`spool config explain --markdown`",
        "--serve": "`spool config render FILE`",
    },
}
"""The same where only one command has changed: by command, the old option and what has taken its place."""

OTHER_SERVERS: dict[str, str] = {
    "--block-size": "--page-size",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--context-length": "--max-model-len",
    "--data-parallel-size": "--target-replicas",
    "--disable-cuda-graph": "--no-cuda-graphs",
    "--disable-radix-cache": "--no-prefix-cache",
    "--dp-size": "--target-replicas",
    "--enable-prefix-caching": "--prefix-cache",
    "--enforce-eager": "--no-cuda-graphs",
    "--max-num-seqs": "--max-running",
    "--max-running-requests": "--max-running",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--model": _MODEL,
    "--model-path": _MODEL,
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--num-speculative-tokens": "--draft-length",
    "--speculative-draft-model-path": "--draft",
    "--speculative-model": "--draft",
    "--tool-call-parser": "--tool-format",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
}
"""Options of vLLM and SGLang, and what does the same here."""

NOT_HERE: dict[str, str] = {
    "--enable-auto-tool-choice": "models may call functions without it",
    "--enable-lora": "LoRA adapters are not supported",
    "--kv-cache-dtype": "KV has the dtype of the weights (--dtype)",
    "--pipeline-parallel-size": "a worker computes on one GPU so far",
    "--quantization": "quantised weights are not supported",
    "--reasoning-parser": "the chat template tells where the model reasons",
    "--seed": "each request names its own",
    "--trust-remote-code": "models bring no code of their own",
}
"""Their options for which there is nothing here, and why."""

# Commands that take what those servers take.
_ENGINE_COMMANDS = ("serve", "generate", "verify")


def usage_message(error: TyperException) -> str:
    """Typer's message for a command line that cannot be parsed, or a better one where the unknown word is known."""
    context = getattr(error, "ctx", None)
    command = context.command_path.removeprefix("spool ") if context is not None else ""
    option = getattr(error, "option_name", None)
    if option is None or not hasattr(error, "possibilities"):
        return error.format_message()
    return _known_word(command, option) or _with_suggestion(command, option, error)


def _known_word(command: str, option: str) -> str | None:
    moved = MOVED.get(command, {}).get(option) or RENAMED_OPTIONS.get(option)
    if moved is not None:
        return f"{option} is now {moved.format(command=command)}"
    here = OTHER_SERVERS.get(option) if command in _ENGINE_COMMANDS else None
    if here is not None:
        return f"No such option: {option}; here it is {here.format(command=command)}"
    why = NOT_HERE.get(option) if command in _ENGINE_COMMANDS else None
    return f"No such option: {option}; {why}" if why is not None else None


def _with_suggestion(command: str, option: str, error: TyperException) -> str:
    """An option that comes near, or for `serve` the fields of the file that are called so."""
    unknown = f"No such option: {option}"
    possible = sorted(getattr(error, "possibilities", None) or ())
    name = option.lstrip("-").replace("-", "_")
    fields = [one.name for one in documents(SpoolConfig, SpoolConfig()) if one.path[-1] == name and not one.section]
    if command == "serve" and fields and name not in FIELDS:
        return f"{unknown}; {' and '.join(fields)} can be set in the configuration file or with --set"
    if not possible:
        return unknown
    nearest = difflib.get_close_matches(option, possible, n=1)
    return f"{unknown}; did you mean {(nearest or possible)[0]}?"
