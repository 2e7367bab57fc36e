"""Types of a chat's fields, with the bounds that files must keep when they are read in."""

from typing import Annotated

from pydantic import Field

Name = Annotated[str, Field(max_length=1000)]
Title = Annotated[str, Field(max_length=10_000)]
Text = Annotated[str, Field(max_length=8_000_000)]
FileText = Annotated[str, Field(max_length=30_000_000)]  # an image takes more than a text
Time = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]  # in seconds since 1970
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
