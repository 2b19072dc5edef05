"""Finds the scheduler through its deployment."""

from __future__ import annotations

from ray.serve.handle import DeploymentHandle


class SchedulerAddress:
    """Asks Serve for the present scheduler each time: one that was replaced has another address."""

    def __init__(self, scheduler: DeploymentHandle) -> None:
        self._scheduler = scheduler

    async def __call__(self) -> str:
        """Raises ConnectionError while there is none."""
        try:
            address: str = await self._scheduler.locate.remote()
        except Exception as error:  # Serve's and Ray's errors have no common ancestor
            raise ConnectionError(f"the scheduler is not to be found: {type(error).__name__}: {error}") from error
        return address
