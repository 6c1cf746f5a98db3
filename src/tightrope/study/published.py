"""The paper's numbers, in per cent unless said otherwise.

Main text and appendix of "Connecting Certified and Adversarial Training"; those of the precision
figures are computed from the margins that its authors published.
"""

from __future__ import annotations

# Precision figures: robust accuracy by an exact encoding, and by the sign of each estimate.
EXACT = {"pgd": 74.82, "ibp": 85.44, "sabr": 86.21, "taps": 87.14, "staps": 87.43}
SHARES = {
    "ibp": {"ibp": 84.81, "sabr": 85.48, "taps": 85.47, "pgd": 85.59},
    "sabr": {"ibp": 83.34, "sabr": 85.44, "taps": 86.22, "pgd": 86.37},
    "taps": {"ibp": 80.95, "sabr": 85.25, "taps": 87.08, "pgd": 87.19},
    "staps": {"ibp": 77.46, "sabr": 84.46, "taps": 87.43, "pgd": 87.53},
}
# Errors of the worst margin (not in per cent): mean, mean absolute, standard deviation.
ERRORS = {
    "pgd": {
        "ibp": (13.84, 13.84, 2.66),
        "pgd": (-0.306, 0.306, 0.600),
        "sabr": (4.61, 4.61, 1.24),
        "taps": (8.42, 8.42, 2.24),
    },
    "ibp": {
        "ibp": (0.0984, 0.0984, 0.0985),
        "pgd": (-0.134, 0.136, 0.334),
        "sabr": (-0.073, 0.101, 0.195),
        "taps": (-0.0020, 0.0060, 0.0260),
    },
    "sabr": {
        "ibp": (0.388, 0.388, 0.212),
        "pgd": (-0.130, 0.138, 0.334),
        "sabr": (0.033, 0.141, 0.200),
        "taps": (0.0014, 0.0125, 0.0335),
    },
    "taps": {
        "ibp": (0.863, 0.863, 0.343),
        "pgd": (-0.113, 0.137, 0.341),
        "sabr": (0.234, 0.290, 0.225),
        "taps": (0.0115, 0.0225, 0.0427),
    },
    "staps": {
        "ibp": (1.249, 1.249, 0.429),
        "pgd": (-0.128, 0.138, 0.346),
        "sabr": (0.370, 0.406, 0.243),
        "taps": (0.0011, 0.0162, 0.0376),
    },
}

# Main results: natural, certified, those of other methods as the paper quotes them. Methods that
# are missing are not in the paper's table.
MAIN = {
    "mnist-0.1": {
        "colt": (99.2, 97.1),
        "sortnet": (99.01, 98.14),
        "ibp": (98.84, 97.95),
        "sabr": (99.23, 98.22),
        "taps": (99.19, 98.39),
        "staps": (99.15, 98.37),
    },
    "mnist-0.3": {
        "colt": (97.3, 85.7),
        "sortnet": (98.46, 93.40),
        "ibp": (97.67, 93.10),
        "sabr": (98.75, 93.40),
        "taps": (97.94, 93.62),
        "staps": (98.53, 93.51),
    },
    "cifar10-2-255": {
        "colt": (78.4, 60.5),
        "sortnet": (67.72, 56.94),
        "ibp-r": (78.19, 61.97),
        "ibp": (66.84, 52.85),
        "sabr": (79.24, 62.84),
        "taps": (75.09, 61.56),
        "staps": (79.76, 62.98),
    },
    "cifar10-8-255": {
        "colt": (51.7, 27.5),
        "sortnet": (54.84, 40.39),
        "ibp-r": (51.43, 27.87),
        "ibp": (48.94, 34.97),
        "sabr": (52.38, 35.13),
        "taps": (49.76, 35.10),
        "staps": (52.82, 34.65),
    },
    "tinyimagenet-1-255": {
        "sortnet": (25.69, 18.18),
        "ibp": (25.92, 17.87),
        "sabr": (28.85, 20.46),
        "taps": (28.34, 20.82),
        "staps": (28.98, 22.16),
    },
}

# Gradient weight w on MNIST 0.3 and TinyImageNet: seconds per sample, natural, adversarial,
# certified. From 15 on, the paper looked at a part of the test set.
WEIGHT = {
    "mnist-0.3": {
        "ibp": (2.3, 97.6, 93.37, 93.15),
        "0": (2.7, 97.37, 93.32, 93.06),
        "1": (4.5, 97.86, 93.80, 93.36),
        "5": (6.9, 97.94, 94.01, 93.62),
        "10": (15.7, 98.25, 94.43, 93.02),
        "15": (42.8, 98.53, 95.00, 91.55),
        "20": (73.7, 98.75, 94.33, 82.67),
        "inf": (569.7, 98.0, 94.00, 45.00),
        "taps alone": (817.1, 98.5, 94.50, 17.50),
    },
    "tinyimagenet-1-255": {
        "ibp": (0.28, 25.00, 19.72, 19.72),
        "1": (1.17, 25.83, 20.24, 20.22),
        "5": (2.34, 28.34, 20.94, 20.82),
        "10": (4.12, 28.23, 21.05, 20.89),
        "20": (5.94, 28.44, 20.68, 20.44),
    },
}

# ReLUs in the classifier: natural, adversarial, certified by MN-BaB, certified by IBP.
SPLIT = {
    "mnist-0.1": (
        (98.87, 98.16, 98.13, 97.83),
        (99.06, 98.37, 98.31, 96.27),
        (99.16, 98.35, 98.25, 87.82),
        (99.19, 98.51, 98.39, 62.83),
        (99.28, 98.47, 98.03, 4.75),
        (99.22, 98.51, 98.17, 9.76),
        (99.09, 98.45, 98.27, 81.89),
    ),
    "mnist-0.3": (
        (97.60, 93.37, 93.15, 93.08),
        (97.94, 94.01, 93.62, 92.76),
        (98.16, 94.18, 93.55, 91.85),
        (98.63, 94.48, 93.03, 89.40),
        (98.7, 94.85, 93.44, 89.52),
        (98.63, 94.64, 93.26, 89.15),
        (98.88, 95.11, 92.70, 85.03),
    ),
    "cifar10-2-255": (
        (67.27, 56.32, 56.14, 53.54),
        (70.10, 57.78, 57.48, 41.86),
        (70.74, 57.83, 57.39, 40.24),
        (71.88, 58.89, 58.23, 34.41),
        (72.45, 60.38, 59.47, 31.88),
        (75.09, 63.00, 61.56, 24.36),
        (75.40, 62.73, 61.11, 24.90),
    ),
    "cifar10-8-255": (
        (48.15, 34.63, 34.60, 34.26),
        (49.76, 35.29, 35.10, 32.92),
        (47.28, 33.54, 33.12, 28.94),
        (48.76, 33.50, 33.12, 29.14),
        (50.19, 34.78, 34.35, 29.14),
        (50.2, 34.33, 33.72, 28.83),
        (51.03, 35.25, 34.44, 29.97),
    ),
}
# TinyImageNet, by method and ReLUs: natural, adversarial, certified.
SPLIT_TINYIMAGENET = {
    "taps": {1: (28.34, 20.94, 20.82), 2: (27.02, 20.94, 20.84)},
    "staps": {1: (28.75, 22.25, 22.04), 2: (28.98, 22.40, 22.16)},
}

# MNIST 0.3, by ReLUs in the classifier: certified, natural. None: the training collapsed.
ESTIMATORS: dict[str, dict[int, tuple[float | None, float]]] = {
    "single": {1: (None, 31.47), 3: (92.91, 98.56), 6: (92.41, 98.88)},
    "multi": {1: (93.62, 97.94), 3: (93.03, 98.63), 6: (92.70, 98.88)},
}

# MNIST 0.3, by restarts and steps: certified, natural.
ATTACK = {
    1: {1: (93.36, 98.22), 5: (93.15, 97.90), 20: (93.62, 97.94), 100: (93.46, 97.94)},
    3: {1: (93.47, 98.22), 5: (93.55, 97.90), 20: (93.52, 97.99), 100: (93.55, 97.99)},
}

# TAPS accuracy as a proxy: correlation with certified and adversarial accuracy; difference to
# each as mean and deviation, in points.
PROXY = {
    "mnist": (0.9139, 0.9633, (1.22, 1.41), (0.33, 0.79)),
    "cifar10": (0.9973, 0.9989, (0.28, 0.95), (-0.40, 0.77)),
}

# Three seeds: mean and deviation of natural, adversarial, certified.
REPEATABILITY = {
    "mnist-0.1-taps": ((99.22, 0.03), (98.45, 0.06), (98.28, 0.10)),
    "mnist-0.3-taps": ((97.96, 0.04), (93.96, 0.04), (93.57, 0.02)),
    "cifar10-2-255-staps": ((79.75, 0.23), (65.91, 0.12), (62.72, 0.23)),
    "cifar10-8-255-taps": ((49.07, 0.61), (34.75, 0.47), (34.57, 0.46)),
}

# Seconds of training and of certifying the whole test set, on one GPU.
COST = {
    "mnist-0.1-taps": (42_622, 17_117),
    "mnist-0.3-taps": (12_417, 41_624),
    "cifar10-2-255-taps": (141_281, 166_474),
    "cifar10-8-255-taps": (27_017, 26_968),
    "tinyimagenet-1-255-taps": (306_036, 23_497),
    "mnist-0.1-staps": (19_865, 12_943),
    "mnist-0.3-staps": (23_613, 125_768),
    "cifar10-2-255-staps": (47_631, 398_245),
    "cifar10-8-255-staps": (48_706, 77_793),
    "tinyimagenet-1-255-staps": (861_639, 35_183),
}
