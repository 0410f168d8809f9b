"""The version, in one place; reading it from package metadata would cost every start 12 ms."""

VERSION = "0.10.0"
