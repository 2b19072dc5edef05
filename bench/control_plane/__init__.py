"""What the control plane costs beside a GPU's steps: `python -m bench.control_plane`."""
