"""Decoding with a large pair on one device: speed, its distance to the device's limit, and equality; and whether the
GPU kernels compile, which needs no GPU.

    python -m bench.gpu all --out FOLDER    everything, on the day there is a GPU
    python -m bench.gpu measure FOLDER --shape qwen3-8b --batch-size 1 --batch-size 8 -o FILE.json
    python -m bench.gpu exactness -o FILE.json
    python -m bench.gpu profile FOLDER --shape qwen3-8b -o FILE.json
    python -m bench.gpu compile

Target and draft are in one process and take turns on the device, driven by the scheduler core without gRPC. Of other
packages this needs what the engine needs: neither Ray nor gRPC, and nothing for the command line.
"""
