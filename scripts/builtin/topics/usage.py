# ruff: noqa: E501 - wordings read best on one line
"""Using the app day by day: memory, the buttons of the page, speed, and what it does not do."""

from .topic import Topic

TOPICS = (
    Topic(
        questions=(
            "{how do i|how can i|how to|can i|where do i} {start|open|begin|make} {a new|another|a fresh|an empty} {chat|conversation}",
            "{how do i|how can i|how to|can i|where do i} {delete|remove|clear|erase} {a chat|this chat|the chat|my chats|the conversation|the history|old chats}",
            "{new chat|delete chat|clear chat|chat list|start over|start again from scratch|reset the chat|clear the history}",
        ),
        answers=("Press New chat on the page to begin another one; Delete this chat removes the open one.",),
    ),
    Topic(
        questions=(
            "{which|what} {settings|sampling settings|options} {are there|can i change|does the page have|do i have}{ on the page|}",
            "{how do i|where do i|how can i|where can i} {change|find|see|open} {the settings|the sampling settings|settings|the options}",
            "{settings|page settings|where are the settings|sampling options}",
        ),
        answers=(
            "The page's settings hold the system prompt and the sampling settings, such as temperature, top-p, top-k, seed and the number of tokens.",
        ),
    ),
    Topic(
        questions=(
            "{what is|what does|what's|explain} {the |}{--device|--host|--gpu-cache-tokens|--cpu-cache-tokens|--dtype} {option|flag|setting|}{ do| mean|}",
            "{how do i|how can i|can i} {limit|set|change|choose} {the size of the gpu-cache|the cache size|the size of the cpu-cache|the device|the host}",
        ),
        answers=(
            "`--device` picks cpu or cuda, `--host` the address, and `--gpu-cache-tokens` and `--cpu-cache-tokens` cap the two caches. "
            "`neo-desktop --help` lists all options.",
        ),
    ),
    Topic(
        questions=(
            "{what happens|what do i do|what should i do|what can i do|what to do|what now} {when|if} {the |my |}{memory|gpu memory|vram|gpu|cache|kv cache|ram|gpu-cache|video memory} {is full|runs out|is too small|fills up|overflows|is not enough|gets full}",
            "{what if|what happens if|what does it do if|and if} {my gpu's memory|the gpu's memory|gpu memory|the memory|the kv cache} {isn't big enough|is not enough|is too small|is used up|cannot hold all chats|is exhausted}",
            "{i keep|i am|it keeps|i always end up} {getting|running|seeing} {out of memory|out of memory errors|oom|memory errors}{, help|, what now|, what can i do|}",
            "{out of memory|oom|cuda out of memory|not enough memory|memory error|i ran out of memory|memory is full|my gpu is too small|vram is full|the kv cache is full|my memory is full}",
            "{how do i|how can i|how to} {use less|save|reduce|free} {memory|vram|gpu memory|ram}{ use|}",
            "{will it|does it|can it} {crash|fail|stop|break} {when|if} {memory|the gpu memory|vram|the cache} {runs out|is full|gets full}",
        ),
        answers=(
            "When the cache is full nothing crashes: with the policy auto, requests may move to the CPU-cache, and others wait or "
            "are preempted and continued later. To need less, use fewer or shorter chats.",
        ),
        weight=1.5,
    ),
    Topic(
        questions=(
            "{how do i|how can i|how to|where do i} {stop|quit|exit|end|close|shut down|kill|terminate|turn off} {the app|neo-desktop|the server|the program|it|this|this app|everything}",
            "{how do i|how can i|how to|how should i} {shut|bring|take|power} {it|this|the app|neo-desktop|this thing|everything|the server} down",
            "{what is|is there|which is} {the|a} {right|proper|clean|good} way to {stop|quit|end|exit|leave} {it|the app|neo-desktop|this program}",
            "{let me out|i want to quit|i want to stop the app|i want to leave the program|end the program|leave the app|exit the program}",
            "{quit|exit|stop the app|stop the server|shutdown|ctrl-c|ctrl c|ctrl+c|close the app|how do i get out|how to quit}",
            "{what does|what happens with|what happens on|what happens when i press} ctrl-c{ do|}",
        ),
        answers=("Press Ctrl-C in the terminal: the app ends cleanly and running requests are told.",),
    ),
    Topic(
        questions=(
            "{how do i|how can i|how to|can i|where do i} {stop|interrupt|cancel|abort|halt} {an answer|the answer|a reply|generation|the model|the generation|the model from talking|a running answer|it from writing|a long answer}",
            "{what does|what is|what's} the stop {button|key} {do|for|}",
            "{how do i|how can i|how to|can i} {make you|make it|make the model|get it to} {stop|stop writing|stop talking|shut up}",
            "{halt|break off|end|stop} {an answer|the answer|a reply|this reply|the running answer} {midway|early|before it ends|halfway|now}",
            "{stop button|stop generating|interrupt the answer|cancel the answer|it won't stop talking}",
        ),
        answers=(
            "Press Stop on the page: the answer ends at once and its memory is freed. An API client just closes the connection.",
        ),
    ),
    Topic(
        questions=(
            "{how do i|how can i|how to|can i|where do i} {regenerate|retry|redo|get another|get a different|repeat} {an answer|the answer|answer|a reply|the last answer|the reply}",
            "{what does|what is|what's} {regenerate|the regenerate button|the retry button|retry} {do|mean|for|}",
            "{i want|i need|give me|i would like|can i have} {a|another|some} {different|other|new|second|better} {answer|reply|version|response}{ to the same question| to that| instead|}",
            "{regenerate|regenerate button|retry button|try again|answer again|another answer}",
        ),
        names=("regenerate",),
        answers=(
            "Regenerate asks the model for a new answer to your last message. With a temperature above 0 it may differ from the first.",
        ),
    ),
    Topic(
        questions=(
            "{how do i|how can i|how to|can i|where do i} {edit|change|correct|fix|rewrite|modify} {a message|my message|my question|what i wrote|my last message|a sent message|my prompt}",
            "{what does|what is|what's} {edit|the edit button|editing} {do|mean|for|}",
            "{i made|there is|i found} a {typo|mistake|spelling error} in my {message|question|text|last message}{, can i fix it|, how do i change it|, what now|}",
            "{can i|how can i|may i} {still |}{change|correct|edit|rewrite} {what i wrote|what i asked|my words|the question i sent|an earlier message}",
            "{edit|edit button|edit message|editing messages|i made a typo in my message}",
        ),
        answers=(
            "Edit lets you change a message that you sent: the chat continues from there with a new answer.",
        ),
    ),
    Topic(
        questions=(
            "{what does|what do|explain|what are|what is} {the |these |}{numbers|figures|values|statistics|stats|small text} {under|below|beneath|next to} {the |an |each |your |}{answer|answers|message|reply} {mean|say|show|}",
            "{what are|what is} the {figures|numbers|statistics|stats} {shown|on the page|here}",
            "{numbers under the answer|figures under each answer|ms and tok/s|what are the ms and tok/s}",
        ),
        answers=(
            "Under each answer you see its time to first token and its tokens per second: how long you waited, and how fast the answer came.",
        ),
    ),
    Topic(
        questions=(
            "{how do i|how can i|how to|where do i} install {neo-desktop|it|this|the app|neo desktop|this program}{ on another computer| again|}",
            "{put|get|install|set up} {neo-desktop|this app|it|the app} on {another|my other|a new|a second|my friend's|the office} {computer|laptop|machine|pc}",
            "{installation|install|installing neo-desktop|install instructions|setup|set-up|how to set up|pip install}",
            "{can i|how do i} {update|upgrade|uninstall|remove} {neo-desktop|it|the app|this app}",
        ),
        answers=(
            "neo-desktop is a Python package: `pip install .` in its folder installs it, and the README has the two commands for a fresh machine.",
        ),
    ),
    Topic(
        questions=(
            "{is it|is this|is neo-desktop|is the app} {free|open source|free of charge|open|mit licensed|commercial|free to use|paid}",
            "{what is|what's|which is|under which} {the |}licen{c|s}e{ of neo-desktop| of this app| is it|}",
            "{does it|do you|will it} cost {anything|something|money|me anything}",
            "{which|what} {licence|license} {does it have|is used|did you choose|do you use|applies|does neo-desktop use|was chosen}",
            "{will|would|does} {it|this|the app|using it} {cost|charge} {me |}{money|anything|something}",
            "{how is it|how is this|under which terms is it} licensed",
            "{licence|license|open source|price|what does it cost|how much does it cost|how much is it|can i use it at work|do i have to pay}",
            "{where is|can i see|can i read|show me} the {source|source code|code}",
        ),
        names=("the licence", "the MIT licence"),
        answers=("neo-desktop is free and open source, under the MIT licence.",),
    ),
    Topic(
        questions=(
            "{who|which company|what company} {made|built|created|wrote|developed|trained|invented|programmed|designed} {you|this|neo-desktop|this app|the app|it|this model}",
            "{which|what} {team|person|people|project|company|group} {made|makes|built|wrote|develops|created} {this|you|the app|neo-desktop|this program|it}",
            "{who is|who's} {your creator|your maker|your author|your developer|behind this|behind neo-desktop|the author|your boss}",
            "{were you made by|do you come from|are you from} {openai|google|meta|anthropic|microsoft|a company|nvidia|apple}",
        ),
        answers=("I was made by the neo-desktop project, as a part of its open-source app.",),
    ),
    Topic(
        questions=(
            "{how is|what is the difference between|compare} {it|this|neo-desktop|neo-desktop and|this and} {different from |different to |better than |with |}{ollama|llama.cpp|vllm|lm studio|chatgpt|other programs|other apps}",
            "{neo-desktop|this} {vs|versus|or|compared to} {ollama|llama.cpp|vllm|lm studio|chatgpt}",
            "{how does it|how does this|how does neo-desktop} {compare to|compare with|differ from} {ollama|llama.cpp|vllm|lm studio|others}",
            "{why not|why not just use|should i use|why not use} {ollama|llama.cpp|vllm|lm studio|chatgpt}",
            "{what is|do you know|tell me about|what about} {ollama|llama.cpp|vllm|lm studio}",
            "what makes {it|this|neo-desktop|this app} {special|different|unique|better}",
        ),
        answers=(
            "llama.cpp and Ollama split a model by layers between GPU and CPU. neo-desktop places each request's KV cache "
            "instead: on the GPU, or in main memory with its attention computed on the CPU.",
        ),
        weight=1.5,
    ),
    Topic(
        questions=(
            "{how many|can several|can two|can many|how much} {users|people|chats|requests|agents|conversations} {can|share|use|run} {it|use it|run|it serve|at once|share it|use this at once|at the same time|be served|it handle}",
            "{can|could} {i|we|my family|my team} {run several chats|share it|open two chats|use it together|send requests in parallel|open more tabs|use it at the same time}",
            "{can|could|may} {a few|several|some|two|my|many} {colleagues|friends|people|users|students|programs|agents} {use|share|chat with|work with} {it|this|you|the model|the server}{ together| at once| at the same time| simultaneously| in parallel|}",
            "{is it|is this|is the app} {multi-user|for several people|for one user only|made for many users|for a team}",
            "{can|could|may} {more than one|another|a second|two} {person|user|people|client|friend} {chat|use it|use this|connect|join|work}{ at a time| at once| with it| with you| too|}",
            "{parallel requests|concurrent requests|several users|multiple users|many requests at once|concurrency|more than one user}",
        ),
        answers=(
            "Many requests run at once: they share one batch, and new ones join at every step. What does not fit in the cache waits its turn.",
        ),
    ),
    Topic(
        questions=(
            "{can|could} {you|i|it|the app|the model} {see|read|understand|make|draw|create|generate|open|look at|upload|show} {images|pictures|a picture|an image|photos|a pdf|files|my files|videos|audio|a file|documents|pdfs|music|my screen}",
            "{draw|paint|generate|make|create} {me |}{a picture|an image|a drawing|a logo|a cat picture|a picture of a cat|a video|a photo}",
            "{can you|do you} {hear|speak aloud|talk aloud|listen to me|hear my voice|see me|use a microphone}",
            "{can|could|may} i {send|show|give|upload|attach} {you |}{a photo|a picture|an image|a file|a pdf|a document|a screenshot|my document|some pictures}",
            "{read|open|look at|check|summarise} {this|my|the} {pdf|file|document|picture|image|photo|screenshot|spreadsheet}{ for me| please|}",
            "{images|pictures|voice|vision|image generation|speech|multimodal|attachments|file upload}",
        ),
        answers=("I only read and write text: no images, no files, no sound.",),
    ),
    Topic(
        questions=(
            "{can|could|does|how do} {i|it|neo-desktop|the app|you} {train|fine-tune|finetune|fine tune} {a model|models|you|my own model|a model here|llama|on my data}",
            "{can i|how do i|how can i|is it possible to|may i} {fine tune|fine-tune|train|retrain|adapt|teach} {my model|llama|you|a model|a checkpoint|qwen|it} {with this|here|in neo-desktop|with neo-desktop|on my texts|with my own data|}",
            "{does it|can i use|do you support|is there} {lora|lora adapters|fine-tuning|finetuning|training|adapters}",
        ),
        names=("fine-tuning", "finetuning", "LoRA", "training a model"),
        answers=("neo-desktop only runs models; it does not train or fine-tune them.",),
    ),
    Topic(
        questions=(
            "{where|how} {can i|do i} {find|read|get|report} {the |}{documentation|docs|manual|help|more help|bugs|a bug|a problem|more information|the readme|an error}",
            "{documentation|docs|manual|readme|user guide|report a bug|something is broken|it does not work|i found a bug|error message}",
            "{where are|is there} {the |}{docs|a manual|documentation|a readme|a tutorial|logs}",
        ),
        answers=(
            "The README explains how to start and use neo-desktop, and every command has `--help`. Error messages say what went wrong and what to do.",
        ),
    ),
    Topic(
        questions=(
            "{which|what} {commands|subcommands|command line options} {are there|does it have|exist|can i use|does neo-desktop have}",
            "{command line|command-line help|cli|list the commands|list of commands|--help|show the help|cli options|all commands}",
            "{how do i|how to} {see|list|find} {the |all |}{commands|options|command line options|flags}",
        ),
        answers=(
            "`neo-desktop` opens the chat, `neo-desktop serve` runs the API alone, `neo-desktop info` shows the hardware, and "
            "`neo-desktop bench` tests it. Add `--help` to see all options.",
        ),
    ),
    Topic(
        questions=(
            "{how do i|how can i|how to|can i} {use|embed|import|call} {neo-desktop|the engine|it|the python api|neo_desktop} {in|from|inside} {python code|my python program|a python script without the server|my own program|python without a server}",
            "{python api|embedding the engine|engine.from_pretrained|from neo_desktop import engine|import neo_desktop}",
        ),
        names=("the Python API", "Engine.from_pretrained"),
        answers=(
            'In Python: `from neo_desktop import Engine`, then `Engine.from_pretrained(DIRECTORY)` and `engine.generate(["Hello"])`. '
            "No server is needed.",
        ),
    ),
    Topic(
        questions=(
            "{why|how come} {is it|are you|is the answer|is generation|is the model|is it so|is my model} {slow|so slow|taking so long|slow today|very slow}",
            "{how do i|how can i|how to|can i} {make it|get it|make the model|make answers} {faster|quicker|run faster|go faster|come faster}",
            "{any|some|is there a|are there} {trick|tricks|tip|tips|way|ways|advice} to {make it faster|speed things up|speed it up|get more speed|go faster}",
            "{it answers|you answer|you write|the words come|the text comes|everything is} {slowly|so slowly|too slowly|really slowly|very slowly|so slow}{, why|}",
            "{it is slow|it's too slow|speed up|make it faster|speed it up|slow answers|why does it take so long|how to improve speed}",
        ),
        answers=(
            "Each token needs all weights to be read once, so speed follows memory bandwidth. A smaller model, a GPU or a shorter context makes answers faster.",
        ),
    ),
    Topic(
        questions=(
            "{how big|how large} {a model can i|a model can it|can a model be|may the model be} {run|load|use|}",
            "{how much|how many gb of} {memory|vram|ram|gpu memory|space} {do i need|does a model need|does a 7b model need|does it need|is needed|does llama 3 need|does an 8b model take|for a 7b model}",
            "{will|does|can} {a 7b model|a 13b model|an 8b model|a 70b model|llama 3 8b|my model|a big model} fit{ in 8 gb| in my gpu| on my gpu| here|}",
        ),
        answers=(
            "In fp16 the weights take 2 bytes per parameter: about 14 GB for 7 billion parameters. The KV cache comes on top and grows with the context.",
        ),
        weight=1.5,
    ),
)
