"""The part of the data config that determines the tokens of a row."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from zerotrain.config.schema import DataConfig
from zerotrain.data.sources import CHAT_FORMATS


@dataclass(frozen=True)
class RenderOptions:
    """The part of the data config that determines the tokens of a row."""

    format: str
    columns: dict[str, str]
    as_chat: bool
    supervise: str
    max_length: int
    on_too_long: str
    ignore_keys: Sequence[str] = ()
    roles: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: DataConfig) -> "RenderOptions":
        names = {field.name for field in fields(cls)} - {"format"}
        return cls(format="auto", **{name: getattr(config, name) for name in names})

    @property
    def is_chat(self) -> bool:
        return self.format in CHAT_FORMATS or (self.as_chat and self.format != "text")
