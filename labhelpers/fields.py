"""Types of the fields of a spec: what each accepts from people and papermill, and its range."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from labhelpers.inputs import (
    to_boolean,
    to_integer,
    to_names,
    to_number,
    to_repeats,
    to_shape,
    to_share,
    to_sizes,
    to_text,
)

Integer = Annotated[int, BeforeValidator(to_integer)]
Number = Annotated[float, BeforeValidator(to_number)]
Boolean = Annotated[bool, BeforeValidator(to_boolean)]
Text = Annotated[str, BeforeValidator(to_text)]
Sizes = Annotated[tuple[int, ...], BeforeValidator(to_sizes)]
Shape = Annotated[tuple[int, ...], BeforeValidator(to_shape)]
Names = Annotated[tuple[str, ...], BeforeValidator(to_names)]
Share = Annotated[float, BeforeValidator(to_share), Field(gt=0, le=1)]
Headroom = Annotated[float, BeforeValidator(to_share), Field(ge=0, lt=1)]
Positive = Annotated[Integer, Field(ge=1)]
Seconds = Annotated[Number, Field(gt=0)]
Repeats = Annotated[int | Literal["auto"], BeforeValidator(to_repeats)]
Seed = Annotated[Integer, Field(ge=0, le=2**63 - 1)]
