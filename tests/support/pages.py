# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The commands that pages show, and their links."""

import re
import shlex

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def documented(page):
    """The commands of a page as ``(variables, name, arguments)``, in their order."""
    found = []
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if "|" in words:
            words = words[words.index("|") + 1 :]
        count = next((i for i, w in enumerate(words) if not re.match(r"[A-Z_]+=", w)), len(words))
        variables, words = dict(w.split("=", 1) for w in words[:count]), words[count:]
        if not words:
            continue
        if words[0] == "./run_llama_train.sh":
            found.append((variables, "train", words[1:]))
        elif words[0] == "torchtitan-lr":
            found.append((variables, words[1], words[2:]))
        elif "-m" in words and words[words.index("-m") + 1] == "torchtitan_lr":
            name, *arguments = words[words.index("-m") + 2 :]
            found.append((variables, name, arguments))
    return found
