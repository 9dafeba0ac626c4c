"""How long communication takes on a cluster, and which links it loads; docs/network.md tells how.

``model.CommunicationModel`` answers; ``describe.describe`` explains an answer; ``sharing`` shares links among what runs
at once; ``sweep_files``, ``fit``, ``calibration`` and ``measured`` calibrate and compare.
"""
