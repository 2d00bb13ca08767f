"""The engine inside a training script that is not ours: the script keeps its loop, model and dense optimizer.

script                       loader.py            session.py                       prefetcher
------                       ---------            ----------                       ----------
for epoch in loader.epochs   epoch_count.py
for batch in loader:   <---- batch  <------------ take, begin  <--- rows ---------
    model(batch)       ----> module.py: look up   (mail and sender threads)
                             in_hand.py, slices.py
    loss.backward()    ----> rows are updated
    optimizer.step()
(next batch)           ----> --------------------> finish  -------- rows back --->
model.state_dict()     <---- files.py  <---------- (a barrier) <--- a checkpoint -
"""
