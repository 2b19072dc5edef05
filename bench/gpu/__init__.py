"""What a GPU does with Spool's engine, found within minutes: `python -m bench.gpu --out FOLDER --seconds 480`.

Target and draft are in one process and take turns on the device, without a scheduler and without gRPC. Of other
packages this needs what the engine needs to compute: neither Ray nor gRPC, protobuf or pydantic.
"""
