"""`plugins:` and `plugin_options:` - modules that add names to a job, and the options of these names."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, create_model
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from finetune.config.section import NameOrPath, Section
from finetune.registry.plugins import plugin_entries

Plugins = Annotated[tuple[NameOrPath, ...], Field(strict=False)]


@dataclass(frozen=True)
class OptionsByName:
    """Marks the section whose keys are the names that the loaded plugins add, each with its own options."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate by the entries in the tables at the time of the validation."""
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema of these options."""
        return handler(options_section().__pydantic_core_schema__)

    def _validate(self, value: Any) -> Section | None:
        if value is None and all(entry.options is None for _, entry in plugin_entries()):
            return None
        return options_section().model_validate({} if value is None else value)


def options_section() -> type[Section]:
    """Return the section with a key for every entry of a loaded plugin that has options; None where none are written.

    Options without a required key are there with their defaults.
    """
    fields: dict[str, Any] = {}
    for _, entry in plugin_entries():
        if entry.options is None:
            continue
        is_required = any(field.is_required() for field in entry.options.model_fields.values())
        description = f"The options of `{entry.name}`."
        annotation = entry.options | None if is_required else entry.options
        default = None if is_required else entry.options()
        fields[entry.name] = (annotation, Field(default, description=description))
    section: type[Section] = create_model("PluginOptions", __base__=Section, **fields)
    section.__doc__ = "The options of plugins."
    return section


PluginOptions = Annotated[Any, OptionsByName()]
