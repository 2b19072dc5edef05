"""Installs the folders of the project under one name: `engine` as `spool.engine`, and so on."""

from setuptools import find_packages, setup

FOLDERS = ("deploy", "engine", "protos", "scheduler", "services")

setup(
    packages=[f"spool.{name}" for name in find_packages(include=[f"{folder}*" for folder in FOLDERS])],
    package_dir={f"spool.{folder}": folder for folder in FOLDERS},
)
