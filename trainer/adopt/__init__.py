"""Training scripts that keep their own loop: `rowcast.adopt`.

the door         adopt, mapped_tables, table_parameter               what the script sees
its steps        adopted_table, script_optimizer                     rows and gradients of a step, and its optimizer
                 catch_up, missed_steps                              steps that rows have missed
                 read_ahead, id_program                              the rows of coming steps
rows between     rows, records, adoption                             here until the first step, then in the engine
                 script_engine, script_process
several ranks    ranks, gradient_sum                                 gradients travel, and the rows of coming steps
a saved run      saved, random_states
"""
