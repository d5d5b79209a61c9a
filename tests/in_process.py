"""The pieces of run_longbench.py in this process, and a watch on what they compress."""

from __future__ import annotations

import json

from kvfactory import cli
from kvfactory.methods import METHODS
from kvfactory.preparation import prepare
from kvfactory.reports.records import read_lines
from kvfactory.reports.stop import StopSignal
from kvfactory.runner import execute


class Runner:
    """Runs the pieces of run_longbench.py in this process."""

    def __init__(self, model, data, save_dir):
        self.common = ["--model_path", model, "--data_dir", data, "--save_dir", save_dir, "--quiet"]
        self.common += ["--datasets", "hotpotqa,trec", "--device", "cpu", "--max_new_tokens", "5"]
        self.common = [str(part) for part in self.common]
        self.save_dir = save_dir

    def job(self, *argv):
        return prepare(*cli.parse([*self.common, *map(str, argv)]))

    def __call__(self, *argv):
        self.last = self.job(*argv)
        with StopSignal() as stop:
            return execute(self.last, stop)

    def paths(self, number=0):
        return self.last.runs[number].paths

    def rows(self, dataset="hotpotqa", number=0):
        return [line.row for line in read_lines(self.paths(number).results(dataset))[0]]

    def record(self, number=0):
        return json.loads(self.paths(number).meta.read_text())


class Watch:
    """Sees every prompt that SnapKV compresses, and does something at one of them."""

    def __init__(self, monkeypatch, at, action):
        self.seen = []
        cluster = METHODS.get("snapkv")
        real = cluster.compress

        def compress(layer, q, k, v, context):
            if layer.shape.layer_idx == 0:
                self.seen.append(context.example_id)
                if context.example_id == at and self.seen.count(at) == 1:
                    action()
            return real(layer, q, k, v, context)

        monkeypatch.setattr(cluster, "compress", compress)


def fail_at(monkeypatch, at, error):
    """The first attempt at example `at` raises."""

    def fail():
        raise error

    return Watch(monkeypatch, at, fail)
