"""What a GPU does with Spool, found within minutes: `python -m bench.gpu --out FOLDER --seconds 480`.

First the pair is served, as users would: `spool serve --no-ray`, called over HTTP. In the other blocks, target and
draft are in one process and take turns on the device, without a scheduler and without gRPC: they need what the engine
needs to compute, and of other packages neither Ray nor gRPC, protobuf or pydantic.
"""
