"""Puts the engine inside a user's training script, which keeps its own loop, model and dense optimizer.

script                       loader.py            session.py, script_run.py        prefetcher
------                       ---------            ----------                       ----------
for epoch in loader.epochs   epoch_count.py
for batch in loader:   <---- batch  <------------ take, begin  <--- rows ---------
    model(batch)       ----> module.py: look up   (mail and sender threads)
                             current_step.py, slices.py
    loss.backward()    ----> rows are updated
    optimizer.step()
(next batch)           ----> --------------------> finish  -------- rows back --->
model.state_dict()     <---- table_files.py <------ (a barrier) <--- a checkpoint -
"""
