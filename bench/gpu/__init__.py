"""What a GPU makes of Spool: one script that finds out within minutes, and whether the kernels compile, without a GPU.

    python -m bench.gpu --out FOLDER --seconds 480     everything that one GPU can tell
    python -m bench.gpu.tables FOLDER/findings.jsonl   its findings as tables
    python -m bench.gpu.compile_kernels                the Triton kernels for every shape; needs no GPU

Target and draft are in one process and take turns on the device, driven step by step without a scheduler and without
gRPC. Of other packages this needs what the engine needs to compute: neither Ray nor gRPC, protobuf or pydantic.
"""
