"""How many targets and drafts a traffic needs: the scheduler's own core, in virtual time."""
