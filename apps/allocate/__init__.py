"""`diffbit allocate` writes the formats that mixed precision chooses as a file; `diffbit plan` forecasts what
quantizing and exporting take."""
