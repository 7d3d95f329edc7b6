"""Kinds of numbers, each with the largest that is taken: far above any use, and below what overflows or never ends."""

from typing import Annotated

from pydantic import Field

MOST = 1_000_000_000
"""Steps, and whatever is counted in them."""

LARGEST = 1e6
"""Of a weight, a factor or a scale."""

LARGEST_PASS = 100_000_000
"""Positions of a mix whose order is drawn at once."""

A_YEAR_SECONDS = 31_536_000.0

Positive = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
NumRows = Annotated[int, Field(ge=0, le=1_000_000_000_000)]
MixRows = Annotated[int, Field(ge=1, le=LARGEST_PASS)]
SomeRows = Annotated[int, Field(ge=1, le=1_000_000_000_000)]
BatchSize = Annotated[int, Field(ge=1, le=1 << 24)]
Length = Annotated[int, Field(ge=1, le=100_000_000)]  # of a text, in tokens
Width = Annotated[int, Field(ge=1, le=1 << 16)]  # of a layer
Pixels = Annotated[int, Field(ge=1, le=16_384)]  # of one side of an image
LayerNumber = Annotated[int, Field(ge=0, le=10_000)]
Workers = Annotated[int, Field(ge=0, le=512)]
Ahead = Annotated[int, Field(ge=1, le=1_000)]  # what is kept ready
Seed = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
Factor = Annotated[float, Field(ge=0.0, le=LARGEST)]
PositiveFactor = Annotated[float, Field(gt=0.0, le=LARGEST)]
Ratio = Annotated[float, Field(gt=0.0, le=1e12)]  # to other such numbers, and of passes over rows
Shift = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
