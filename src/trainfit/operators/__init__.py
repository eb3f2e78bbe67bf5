"""What is known about operators by their name and their recorded call. No torch: whoever asks has a name.

What torch's schema says of an operator (it returns views, writes to an argument, draws random numbers) is
read where torch is, by `capturing/schemas.py`; here is what only the name tells.

names               the forms in which a name is written, and sets of operators
memory_use          what only allocates, is a view, overwrites, copies, moves running statistics
value_use           what shows values to Python, is sized by values, reads only shapes, is random
families            which kind of operator it is: convolution, product, attention, reduction, gather, list
collectives         which communication between processes it is
recorded_calls      the arguments of a recorded call, and the sizes of its tensors
matrix_products     products, convolutions and recurrent layers: the shapes that are multiplied
convolution_calls   convolutions: their kind, their layout, and what each pass reads and writes
fused_attention     fused attention: the shape of the work inside
arithmetic          what other operators compute per element
traffic             the bytes that a call moves
access_patterns     how a call walks through memory
copied_inputs       what a kernel copies before it reads it
call_contents       all of these about one call, found once
work                FLOPs and bytes of a call, from all of these
"""
