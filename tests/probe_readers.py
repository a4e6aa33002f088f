"""Readers of the probes that are asked in words, by plain loops over their text. Imports nothing of posbench.

A solver gets the text up to the answer and says the answer. A trivial reader gets the text up to one of the answers, as
a model does that is given the right ones before it, and says something that takes no solving.
"""

import re


def passkey(text):
    return re.findall(r'The key is "(\d)". Remember', text)[0]


def multi_key(text):
    asked = re.search(r'The number of (\w+) is "$', text)[1]
    return dict(re.findall(r'The number of (\w+) is "(\d)"\.', text))[asked]


def multi_value(text):
    asked = re.search(r'The numbers of (\w+) are "$', text)[1]
    return '", "'.join(re.findall(rf'A number of {asked} is "(\d)"\.', text))


def variable_tracking(text):
    values = dict(re.findall(r"\n(\w+) = (\S+)\n", text))
    found = re.search(r'The value of (\w+) is "$', text)[1]
    while not found.startswith('"'):
        found = values[found]
    return found.strip('"')


def _listed(text):
    lines, listed = text.split("\nThe most common word is:")[0].split("\n"), []
    while lines and re.fullmatch("[a-z]{3,5}", lines[-1]):
        listed.append(lines.pop())
    return listed  # the last one first


def common_words(text):
    listed = _listed(text)
    return max(listed, key=listed.count)


def trivial_multi_key(text):
    return re.findall(r'The number of \w+ is "(\d)"\.', text)[-1]


def trivial_multi_value(text):
    told, _, said = text.rpartition("The numbers of")
    return min(set(re.findall(r'A number of \w+ is "(\d)"\.', told)) - set(re.findall(r'"(\d)"', said)))


def trivial_variable_tracking(text):
    return re.findall(r'\n\w+ = "(\d)"\n', text)[-1]


def trivial_common_words(text):
    return _listed(text)[0]
