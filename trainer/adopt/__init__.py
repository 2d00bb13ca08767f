"""Training scripts: `rowcast.adopt` leaves them as they are.

the door         adopt, mapped_tables, table_parameter               what the script sees
its steps        adopted_table, script_optimizer, optimizer_trial    rows and gradients of a step, and its optimizer
                 catch_up, missed_steps, step_log                    steps that rows have missed
                 read_ahead, id_program, given_ids                   the rows of coming steps
rows between     rows, first_rows, adoption                          here until the first step, then in the engine
                 script_engine, residency, script_process
several ranks    ranks, coming_rows, gradient_sum, data_parallel     gradients travel, and the rows of coming steps
                 dense_weights
a saved run      saved, random_states
"""
