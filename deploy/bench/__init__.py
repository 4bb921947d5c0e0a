"""`paceline bench`: a load generator for any server with the OpenAI API.

prompts.py     what is asked: built-in sets, or a file
stream.py      one answer: events and when they came
server.py      the server over HTTP: its model, which fields it takes, one request
load.py        who asks when: clients in a closed loop, or Poisson arrivals
summary.py     figures of a run
table.py       the figures as text
command.py     options, the runs, their JSON
"""
