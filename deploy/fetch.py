"""`spool models fetch`."""

from __future__ import annotations

from deploy.models import fetch
from deploy.options import DEMO
from deploy.progress import error_console, reporting
from scheduler.messages import Role


def fetch_models(name: str) -> dict[str, str]:
    """Makes a model ready and returns its folder by role; the demo is a pair. Raises `UsageError` and `RunError`."""
    console = error_console()
    roles = (Role.TARGET, Role.DRAFT) if name == DEMO else (Role.TARGET,)
    with reporting(console) as reporter:
        folders = {role: fetch(name, role, reporter) for role in roles}
    for role, folder in folders.items():
        console.print(f"{name} {role.value}: {folder}", highlight=False, markup=False, soft_wrap=True)
    return {role.value: str(folder) for role, folder in folders.items()}
