"""`rowcast.connect`: the prefetcher reads the data of a training script, and the run is rowcast's to save and resume.

script                       the door             its steps                        prefetcher
------                       --------             ---------                        ----------
for epoch in loader.epochs   loader.py            session.py, script_run.py
for batch in loader:   <---- batch.py  <--------- take, begin  <--- rows ---------
    model(batch)       ----> module.py: look up   (mail and sender threads)
                             current_step.py
    loss.backward()    ----> rows are updated
    optimizer.step()
(next batch)           ----> --------------------> finish  -------- rows back --->
model.state_dict()     <---- settings.py  <------- (a barrier) <--- a checkpoint -

Under both are the folder of the run, its files, and what a checkpoint holds of the script: run_folder.py,
table_files.py, script_state.py.
"""
