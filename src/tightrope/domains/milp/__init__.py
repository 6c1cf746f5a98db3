"""A network on one box as a mixed-integer program: exact answers by HiGHS."""
