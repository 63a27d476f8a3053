"""The command line behind ./provision: verbs, progress, the closing report, the test stages."""
