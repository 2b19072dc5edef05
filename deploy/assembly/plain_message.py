"""Messages of the protocol as plain data."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message


def plain_message(message: Message) -> dict[str, Any]:
    """Plain data for JSON: fields by name, enums by name, bytes in hexadecimal, absent messages as None. Values of maps
    stay as they are.

    Protobuf's own JSON form turns long integers into text.
    """
    data: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            data[field.name] = dict(value)
        elif field.is_repeated:
            data[field.name] = [_plain(field, item) for item in value]
        elif field.has_presence and not message.HasField(field.name):
            data[field.name] = None
        else:
            data[field.name] = _plain(field, value)
    return data


def _plain(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain_message(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else value
    return value.hex() if isinstance(value, bytes) else value
