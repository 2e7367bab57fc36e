# ruff: noqa: E501 - wordings read best on one line
"""What neo-desktop is, how it is started and how it is used."""

from .topic import Topic

LOAD = "`neo-desktop --model DIRECTORY`"

TOPICS = (
    Topic(
        questions=(
            "{who|what} are you{ exactly| really|}",
            "{who|what} am i {talking|speaking|chatting} {to|with}",
            "{what's|what is|whats|tell me|do you have} {your name|a name}",
            "{introduce yourself|tell me about yourself|describe yourself|who is this|who's there|what is this bot}",
            "{you are|you're|aren't you|i think you are|so you are} {chatgpt|gpt-4|claude|gemini|siri|a big ai|openai's model|some llama}{, right|, aren't you|, no|}",
            "{are you|r u} {chatgpt|gpt|gpt-4|claude|gemini|llama|siri|alexa|a chatbot|an ai|an llm|an assistant|a language model|copilot|mistral|qwen|deepseek}",
            "{which|what} {model|llm|ai|language model|kind of model|assistant|bot} {are you|is this|am i using|do i talk to|is running|is loaded|answers me}",
        ),
        answers=(
            "I am the guide built into neo-desktop: a very small language model that knows this app, some simple "
            "sums and little else.",
        ),
        more="I was trained from scratch for this app, so that its first start needs no download. For real work, load a real model with "
        f"{LOAD}.",
        weight=3,
    ),
    Topic(
        questions=(
            "{what can you do|what do you do|what can i ask you|what do you know|how can you help me|what are you good at|your abilities|your skills|help|help me|can you help me|i need help|what are you able to do|capabilities|commands|what are your features}",
            "{what is|what's} your {job|purpose|task|role|function}",
            "{what are you for|why are you here|why do you exist|why is there a built-in model|what is the built-in model for}",
            "{tell me|show me|explain|list|say} {what|which things|the things} {you can do|you know|you can help with|i can ask you|you are good at|you can explain}",
            "{what|which} {things|sort of things|kind of things|kinds of questions|stuff} {can you help with|do you know|can you explain|can i ask about|are you good at}",
            "{so |}what are you {capable of|able to do|able to tell me|good for|useful for|there for}",
            "{i need some|could you give me some|please give me} {help|assistance|guidance|support}{ here| with this|}",
            "{what topics|which topics|what subjects|which questions|what questions} {can you answer|do you know|do you cover|can i ask}",
        ),
        answers=(
            "I explain neo-desktop: how to load a real model, how to use the API, and what words like KV cache, batch or "
            "offloading mean. I also do small sums. Anything else is for a real model.",
        ),
        more="Try: how do I load a model? What is a KV cache? How do I use the API? What is 12 + 30?",
        weight=2,
    ),
    Topic(
        questions=(
            "{what is|what's|what are|explain|describe|tell me about|whats} {neo-desktop|neo desktop|this app|this program|this software|this tool|this thing|this project|this page|this application|this website}",
            "{what does|what can} {neo-desktop|neo desktop|this app|this program|the app|this tool|this software|it} do",
            "{what is|what's} {neo-desktop|neo desktop|this app|this program|it} {for|good for|about|used for|useful for}",
            "{why would|why should|why do} {somebody|anybody|one|people|someone|a person} {use|want|need|install|pick} {neo-desktop|this app|this|it|this program}",
            "{why|when} {should i|would i|would anyone|do i} {use|need|want|install|try} {neo-desktop|neo desktop|this app|this|it}",
            "{neo-desktop|neo desktop|neodesktop|the app|about this app|about neo-desktop|the purpose of this app|purpose of neo-desktop}",
            "{explain|summarise|describe|sum up} {to me |}{what|the purpose of what} {this app|neo-desktop|this program|the software} {does|is about|is good for}",
            "{what|which} {problem|problems|need} does {it|this|this app|the program} {solve|address|help with}",
            "{why|what for} {was|is|did somebody make} {this app|this program|this software} {made|there|useful}",
            "{where am i|what did i just start|what did i install|what have i opened|what am i looking at|what is going on here}",
            "{who is|who's} {this|neo-desktop|neo desktop|this app} {for|made for}",
        ),
        answers=(
            "neo-desktop runs large language models on your own computer, at full accuracy, even when the GPU's memory is "
            "small. It gives you this chat page and an OpenAI-compatible API on the same port.",
        ),
        more="Its idea is to keep part of the KV cache in the computer's main memory and to compute attention there "
        "on the CPU, so that more and longer chats fit beside a small GPU.",
        weight=3,
    ),
    Topic(
        questions=(
            "{how do i|how can i|how to|how does one|how would i} {start|run|launch|open|begin} {neo-desktop|the app|this app|the chat|neo desktop|the program|it}",
            "what {do i|must i|should i} {type|enter|run} to {start|open|launch|run} {the app|neo-desktop|the chat|the page|it}",
            "{kick off|get going|bring up|turn on|switch on} {the app|neo-desktop|the chat|this program}",
            "{which|what} command {starts|runs|opens|launches} {the app|neo-desktop|the chat|it|the page}",
            "{how do i|how can i|how to|can you tell me how to} {fire up|boot|get going with|bring up|get into|get} {the app|neo-desktop|the chat|this program|the page|it running|the app running|started}",
            "{starting|running|launching} {neo-desktop|the app|the chat}",
            "{how do i get|how to get} {the chat|the page|the browser page|to the chat page}",
        ),
        answers=(
            "Type `neo-desktop` in a terminal: it starts the engine and opens the chat in your browser.",
        ),
        more=f"Without a model of your own you get me. {LOAD} starts it with a real model, and `neo-desktop serve` starts only the API.",
        weight=1.5,
    ),
    Topic(
        questions=(
            "{how do i|how can i|how to|how would i|how does one|can i|could i|i want to|i would like to|where do i|let me|please} {load|use|run|open|try|start|add|change to|switch to|choose|select|install|set up|put in} {a|my own|another|a real|a different|the real|a bigger|a better|a large|an other|my|a new|a proper|an actual} {model|llm|checkpoint|language model|one|ai model}",
            "{how do i|how can i|how to|can i|i want to} {load|use|run|try|start|chat with|talk to} {llama|mistral|qwen|llama 3|qwen3|qwen2.5|mistral 7b|llama 2|llama 3.1|llama 3.1 8b|a llama model|a qwen model|a mistral model|a 7b model|an 8b model}",
            "{use|using|install|import|bring|load} {my|my own|your|a different} {model{s|}|llm|checkpoint|weights}",
            "{how would i go about|what is the way of|what do i do for|is there a way of|i need help with|how about|what about} {loading|using|running|adding|trying|putting in} {a model|my own model|another model|a real model|my llm|my checkpoint|qwen|llama|mistral}",
            "{i've got|i have|i just downloaded|here is|i found|i own} {a llama|a qwen|a mistral|an llm|a model|weights|a checkpoint|a 7b model} {on my disk|from hugging face|in a folder|on my computer|from the hub}, {how do i|how can i|how to|can i|please} {use it|load it|run it|chat with it|talk to it|try it|make you use it|make it run here}",
            "{i would rather|i want to|i'd like to|can i|let me|how can i} {chat|talk|speak} {with|to} {a real model|llama|a smarter model|something better|a big model|another model|someone smarter}{ instead|}",
            "{you are too small|you know too little|this is not enough|i need more}, {how do i|how can i|what do i do to} {get a real model|use a better one|load something bigger|get a smarter one}",
            "{which|what} {flag|option|argument|parameter|setting} {loads|selects|sets|takes|chooses} {the model|a model|my model|the weights|the checkpoint}",
            "{load|loading|change|changing|switch|switching|swap|replace} {the |a |}{real |other |}model{s|}",
            "{how do i|how can i} {get|have} {a real model|a better model|better answers|smarter answers|a smarter model|something smarter|a real llm} {here|in here|running|}",
            "{model|checkpoint} {loading|loading help|option|flag|directory|folder|path}",
            "{what is|what does} {the |}--model{ option| flag|} {do|for|mean|}",
            "{which|what} command {loads|starts|runs|opens} {a model|a real model|my model|llama|mistral|qwen|my checkpoint}",
            "{where do i put|where to put|how do i give you|how do i pass|where do i specify} {the model|my model|model files|my weights|the checkpoint|the weights}",
            "{i want|i need|i'd prefer|i would like} {a|to use a|to have a} {smarter|better|bigger|larger|real|stronger|more capable} {model|assistant|llm|one|ai}",
            "{what|which} {steps|option|options|argument|flag} {are needed|do i need|is needed|do i use} {to|for} {load|loading|run|running|use|using} {a model|my model|a real model|a checkpoint|llama|qwen}",
            "{make|let} {it|neo-desktop|the app|this} {use|load|run} {my model|another model|llama|a real model|the checkpoint on my disk}",
            "i {have|downloaded|got} {a model|llama|a checkpoint|a hugging face model|qwen|mistral|weights}, {what now|how do i use it|how do i run it|how do i load it|what next}",
            "{can you|how do you} load {a|another} model",
        ),
        answers=(
            f"Start the app with {LOAD}, where DIRECTORY is a Hugging Face checkpoint: a folder with config.json, "
            "tokenizer.json and safetensors files.",
        ),
        more="Supported families are Llama 2 and 3, Mistral, Qwen2.5 and Qwen3. Stop this app with Ctrl-C first, or choose another port with `--port`.",
        weight=5,
    ),
    Topic(
        questions=(
            "{which|what} {models|model families|llms|architectures|families|kinds of models|model types|checkpoints} {are supported|do you support|does it support|does neo-desktop support|can i use|can i run|can it run|can i load|work|work here|does this run|are possible}",
            "{would|will|might} {llama 3.2|a mistral model|qwen2.5|a llama checkpoint|qwen3 8b|mistral 7b|my llama model} {run|work|be ok|be fine|load}{ here| with this| in neo-desktop|}",
            "{tell me|i want to know|say} {which|what} {models|model families|llms} {you can run|it can load|are supported|work here|it runs}",
            "{does|will|can} {it|neo-desktop|this app|this|the app} {run|support|load|work with|handle|do} {llama|mistral|qwen|qwen3|llama 3|llama 2|llama 3.2|qwen2.5|mistral 7b|qwen 3|llama models|other models}",
            "{is|are} {llama|mistral|qwen|qwen3|llama 3|llama 3.1|qwen 2.5|mistral models|llama models} supported",
            "{supported|compatible} {models|model families|architectures|llms|families}",
            "{list of|list|list the|show me the|show} {supported |available |}{models|model families|families}",
            "{is|are} {llama|mistral|qwen|qwen 3|llama 3 models} {ok|okay|fine|possible|an option|allowed}{ here|}",
            "{can i use|does it run|is there support for|do you support} {gemma|phi|falcon|gpt-2|opt|mixtral|deepseek|gpt-oss|bloom|olmo}",
        ),
        answers=(
            "neo-desktop runs Llama 2 and 3, Mistral, Qwen2.5 and Qwen3 from Hugging Face checkpoints in safetensors format. "
            "Other families are refused with a clear message.",
        ),
        more=f"Load one with {LOAD}. GGUF files are not supported yet.",
        weight=2.5,
    ),
    Topic(
        questions=(
            "{does|can|will} {it|neo-desktop|this|the app} {load|run|read|open|support|use} {gguf|gguf files|a gguf|gguf models|a gguf file|llama.cpp files|ggml files|quantised gguf files|ollama models}",
            "{is|are} {gguf|gguf files|ggml|gguf models} supported",
            "{my|the} {file|model} {ends in|is a|is in|has the ending} {.gguf|gguf|gguf format}{, is that ok|, will that work|, can i use it|}",
            "{how do i|can i|how to} {load|use|open|run} {a gguf|gguf|gguf files|a gguf file|ggml|my gguf|an ollama model|a .gguf}",
            "{which|what} {file formats|formats|file format|weight formats|file types} {are supported|can i use|do you read|does it read|are possible|work}",
            "{does|can} {it|the app} {load|read|use} {pickle|.bin files|pytorch files|pth files|.pt files|onnx|pytorch_model.bin|awq|gptq}",
        ),
        names=("GGUF", "gguf"),
        answers=(
            "GGUF is not supported yet: neo-desktop reads Hugging Face directories with safetensors weights, and never pickle files.",
        ),
        more="Look for the safetensors version of the same model: most publishers offer both.",
        weight=1.5,
    ),
    Topic(
        questions=(
            "{what is|what are|explain|define} {a |}{safetensors|safetensors file|safetensors files|.safetensors|safe tensors}",
            "{why|what makes} safetensors{ safe| better| and not pickle|}",
        ),
        names=("safetensors", "the safetensors format"),
        answers=(
            "safetensors is a file format for model weights: plain tensors and no code, so loading it can run nothing harmful.",
        ),
    ),
    Topic(
        questions=(
            "{where do i|where can i|how do i|how can i|where to|how to} {find|get|download|obtain} {models|a model|checkpoints|weights|llama|qwen|mistral|a checkpoint|real models|safetensors files}",
            "{can you|does it|does the app|can neo-desktop} download {models|a model|llama|weights|them} {for me|by itself|}",
            "{download|downloading|getting} {a model|models|llama|qwen|weights}",
        ),
        names=(
            "hugging face",
            "huggingface",
            "a hugging face checkpoint",
            "a checkpoint",
            "hugging face directory",
        ),
        answers=(
            "Hugging Face is a site where models are published. Download a checkpoint there, a folder with config.json, "
            f"tokenizer.json and safetensors files, and start {LOAD}.",
        ),
        weight=1.5,
    ),
    Topic(
        questions=(
            "{how do i|how can i|how to|can i} {use|call|reach|access|query|talk to|connect to|try} {the api|the rest api|this api|the openai api|the http api|your api|it from python|it from code|it from a script|this from python|the engine from python|the server|it with curl|the endpoint}",
            "{is there|do you have|does it have|where is|does neo-desktop have|what is} {an api|the api|a rest api|the api address|the api url|the base url|an endpoint|an openai api|a python api|the endpoint|an http api}",
            "{api|rest api|api usage|api url|base url|base_url|api endpoint|openai client|openai compatible api|curl example|api docs|api help}",
            "{how do i|can i|how to} {use|point} the openai {client|library|python client|package|sdk} {with this|here|at this|with neo-desktop|}",
            "{which|what} {url|address|endpoint|base url} {do i use|should i use|is the api at|does the api have|for the api|is the api on}",
            "{can|could} {other programs|my script|my code|an agent|another app|my editor|my agent} {use|call|talk to|connect to} {this|it|the model|neo-desktop|you}",
            "{how do i|how can i|how to|can i} {connect|hook up|link|attach|use} {my program|my script|my bot|an agent|my editor|python|langchain|my own app|the openai library} {to|with} {you|this|the server|neo-desktop|the api|it}",
            "{which|what} {base url|url|address|host|endpoint} {do i|should i|must i|should my script|does my code} {give|set|enter|use|put in}{ in my code| in my client|}",
            "{is there|do you offer|does it offer|do you provide|have you got} {some|a|any} {interface|http interface|rest interface|web service|endpoint|api} {for programs|for scripts|to call|for developers|for my code|}",
            "{send|sending|post|make} {a request|requests|http requests|a chat request} {to you|to the server|with curl|from python|from my code|to the api}",
            "is {it|the api|this} {openai compatible|compatible with openai|like the openai api}",
        ),
        names=("REST API", "the API", "OpenAI-compatible API"),
        answers=(
            "The API speaks OpenAI's protocol at http://127.0.0.1:8000/v1: give that as base_url to the openai client, "
            "or POST to /v1/chat/completions.",
        ),
        more="`neo-desktop serve` starts it without the chat page. /v1/models lists the model, and /health says whether the server is up.",
        weight=3,
    ),
    Topic(
        questions=(
            "{what does|what is|explain|when do i use|what's} {neo-desktop serve|`neo-desktop serve`|serve|the serve command|serve mode} {do|for|mean|}",
            "{how do i|how can i|can i|how to} {run|start|use} {it|the server|neo-desktop|the app|only the api|just the api|the api} {without|with no} {the page|a page|a browser|the ui|ui|the chat|a screen|gradio}",
            "{headless|headless mode|no ui|without ui|server mode|api only|only the api|server only|run as a server}",
            "{i want|i need|i only want|give me|i'd like} {only |just |}{the server|the api|the api server} {without|and no|but no|but not} {a page|web page|the page|ui|browser|chat page}",
            "{can it|can i|how to} run {on a server|in the background|on a machine without a screen|over ssh|without opening a browser}",
            "{how do i|how to} {start|run} {only |just |}the {api |}server",
        ),
        answers=(
            "`neo-desktop serve` starts the API without the chat page, for scripts, agents or a machine without a screen.",
        ),
        more="It takes the same options as the chat, for example `neo-desktop serve --model DIRECTORY --port 9000`.",
        weight=1.5,
    ),
    Topic(
        questions=(
            "{do i need|is there|where do i get|how do i set|what about|where is|which is|do you need|need} {an |the |a |my |}{api key|key|password|token for the api|api token|openai key|login|account}",
            "{does|will} {the openai client|my script|the server|the api|openai|it} {need|want|require|ask for|check} {a|an|any|some} {key|api key|password|token}",
            "{what|which} {key|password|token} {do i|should i|must i} {give|send|enter|put|set|use}{ for the api| in the client| to the openai client|}",
            "{must i|do i have to|should i|do i need to} {register|sign up|log in|make an account|pay}{ first| somewhere|}",
            "{which|what} api key {do i use|should i use|do i need|do i give the openai client|to use}",
            "{do i need|is there|must i create} {a login|an account|to log in|to sign up|to register|a subscription}",
        ),
        names=("API key", "the api key"),
        answers=(
            "On this computer no API key is needed: give the openai client any text. A key, set with `--api-key`, is required only when the server listens on another address.",
        ),
        more="Without a key the server listens on the loopback address alone, so that nobody else can reach it.",
        weight=1.5,
    ),
    Topic(
        questions=(
            "{how do i|how can i|can i|how to|where do i} {change|choose|set|pick|use|select} {the port|another port|a different port|port|the port number}",
            "{what|which} port {are you|is the server|is the page|is neo-desktop} {on|listening on|using|served on|running at}",
            "{which|what} port {does it use|is used|is it on|does it run on|do you use|is the default|does the api use|does the server listen on|is this}",
            "{port|ports|default port|port option|port number|the port|--port}",
            "{the |}port {8000 |}is {busy|in use|taken|already in use|not free|blocked|occupied}",
            "{8000|port 8000|the default port|that port} is {taken|busy|occupied|in use|not available}{ on my computer| already|}{, what now|, what should i do|, help|}",
            "{something|another program|a server} {already |}{runs|listens|is} on {port 8000|8000|that port}",
            "{address already in use|port 8000 is already used|something else uses port 8000|what if the port is busy}",
        ),
        names=("the port", "a port"),
        answers=(
            "The default port is 8000, for the page and the API alike. Choose another one with `--port`, for example `neo-desktop --port 9000`.",
        ),
        weight=1.5,
    ),
    Topic(
        questions=(
            "{is|are} {it|this|this app|neo-desktop|my data|my chat|my chats|this chat|my messages|my text|the chat} {private|safe|secure|local|sent anywhere|sent to the cloud|sent to a server|stored in the cloud|confidential|logged online|shared}",
            "{do you|does it|does neo-desktop|does this app} {send|share|upload|collect|leak|sell|store|transmit} {my data|data|my messages|my chats|anything|anything to the internet|telemetry|information|my text}{ anywhere| online|}",
            "{who|can anyone|can someone|can others|can somebody} {can |}{see|read|access} {my chats|my messages|what i write|this chat|my data|what i type}",
            "{privacy|data protection|security|telemetry|is there telemetry|do you phone home|confidentiality|are you spying on me}",
            "{does it|do you|does this} {need|use|require} {the internet|internet|a connection|a network|wifi|the cloud}",
            "{does it|can it|can i use it|does this|will it} {work |run |}offline",
            "{how do i|how can i} {know|be sure|check} that {nobody|no one} {reads|sees|gets} {my chats|my data|what i write}",
            "{will|does|do} {anybody|anyone|somebody|a company|you|your makers} {else |}{see|read|get|save|record} {this|my questions|what i type here|my text|these messages}",
            "{are|will} {my chats|my conversations|my messages|my words|the chats|our chats} {be |}{uploaded|saved on a server|recorded|sent|shared|given|sold|visible} {to|with|by} {a company|someone|others|the cloud|anyone}",
            "{is|will} {my privacy|my data|what i write|my secret} {be |}{safe|guaranteed|protected|respected|at risk}{ here| with you|}",
            "{can|could|do} {my boss|my neighbour|my neighbours|hackers|the government|a stranger|my provider|strangers|google|openai} {read|see|watch|get|access} {this|our chat|our conversation|my words|what i type|my chats}",
            "{can i|could i|may i|will it} {use it|use this|work|use you|run this} {on a train|on a plane|in the woods|without wifi|without a connection|without internet|when i am offline|with no network}",
            "{does|do|will} {anything|something|my text|what i write|any data|my words} {leave|get out of|go out of} {my computer|this machine|my machine|this pc|the house}",
            "{can|could} {other people|others|someone else|my phone|another computer|my network} {reach|use|connect to|see} {this|the page|the server|it|the api}",
        ),
        names=("privacy", "loopback", "127.0.0.1", "localhost"),
        answers=(
            "Everything stays on this computer: the model runs here, and the server listens only on the loopback address "
            "127.0.0.1. Nothing that you type is sent anywhere.",
        ),
        more="Requests from foreign web pages are refused too, since Host and Origin are checked. To listen on another address, give `--host` and `--api-key`.",
        weight=3,
    ),
    Topic(
        questions=(
            "{what does|what is|explain|what's} {neo-desktop info|`neo-desktop info`|the info command|info} {do|show|for|print|}",
            "{which|what} {command|option} {prints|shows|displays|lists|tells me} {details about|facts about|information on|} {my hardware|my gpu|my computer|the versions|my cpu|what was found|the gpu}",
            "{details|facts|information|specs} {about|of|on} my {gpu|hardware|computer|machine|system|cpu}",
            "{how do i|how can i|how to|where do i} {see|check|find|show|know} {my hardware|the version|which version i have|what hardware is used|the versions|if the gpu is found|whether my gpu is used|my gpu|versions|the paths|which gpu it uses}",
            "{hardware info|version|which version is this|version number|system info|what version are you|what hardware do i have|is my gpu detected}",
        ),
        answers=(
            "`neo-desktop info` prints the hardware that was found, the versions in use and the paths.",
        ),
    ),
    Topic(
        questions=(
            "{what does|what is|explain|what's} {neo-desktop bench|`neo-desktop bench`|the bench command|bench|the benchmark|the self-test|the hardware self-test} {do|for|measure|}",
            "{how do i|how can i|how to|can i} {benchmark|measure|test} {my machine|my computer|my cpu|my hardware|the speed|it|this machine|performance|memory bandwidth|the cpu kernel}",
            "{benchmark|benchmarks|bench|self-test|self test|run a benchmark|hardware test|speed test}",
            "how fast is my {cpu|computer|machine|memory|hardware}",
        ),
        answers=(
            "`neo-desktop bench` is the hardware self-test. `neo-desktop bench --suite cpu-attention` times attention on your "
            "CPU and compares it with the memory bandwidth of this machine.",
        ),
        weight=1.5,
    ),
    Topic(
        questions=(
            "{do i need|is a|does it need|must i have|does this need|do you need|does neo-desktop require} {a |an |}{gpu|graphics card|nvidia card|nvidia gpu|video card|cuda|cuda gpu|strong gpu}",
            "{my|this|the} {pc|computer|laptop|machine|server} {has no|lacks a|is without a|does not have a|comes without a} {gpu|graphics card|video card|nvidia card}{, is that a problem|, does it work|, what now|}",
            "{is|are} {a gpu|an nvidia gpu|a graphics card|cuda|an nvidia card} {needed|required|mandatory|necessary|optional|a must}",
            "{i don't own|i do not own|i don't have|i have not got|we have no} {a|any} {graphics card|gpu|nvidia card|video card}",
            "{only a cpu|just a processor|a plain laptop}, {is that enough|does that work|can it run|will it run there}",
            "{does it|can it|can i|will it|can i use it|does this|does neo-desktop} {run|work|run models|start} {without|with no} {a gpu|gpu|a graphics card|cuda|an nvidia card|any gpu}",
            "{i have no|i don't have a|my computer has no|my laptop has no|what if i have no|there is no} {gpu|graphics card|nvidia card|nvidia gpu|cuda}",
            "{cpu only|cpu-only|no gpu|without gpu|cpu mode|run on cpu|can i use only the cpu|only a cpu}",
        ),
        answers=(
            "No GPU is needed: without one the linear layers run on the CPU with torch and attention in the native kernel. "
            "It is slower, but the answers are the same.",
        ),
        weight=2,
    ),
    Topic(
        questions=(
            "{which|what} {gpu|gpus|graphics card|graphics cards|hardware|computer|machine} {do i need|is needed|are supported|works|is required|can i use|is enough|is recommended}",
            "{is|would} {a t4|an rtx 3060|my gtx 1080|my gaming laptop|an old card|6 gb of vram|a 12 gb card|a laptop gpu} {good enough|enough|sufficient|ok|fast enough|supported|be enough}",
            "{which|what} {kind of|sort of} {hardware|machine|computer|gpu|pc} {is it|is this|is neo-desktop|was it} {made|meant|intended|designed|built|good} for",
            "{does it|will it|can it} {work|run} on {a t4|my laptop|an rtx 3060|my rtx 4090|a small gpu|an old gpu|a gaming pc|my desktop|a mac|an amd gpu|a workstation|8 gb of vram}",
            "{hardware|system} requirements",
            "{minimum|required|recommended} {hardware|gpu|memory|specs}",
        ),
        answers=(
            "neo-desktop is made for one computer with an NVIDIA GPU whose memory is small, such as a T4, an RTX 3060 or a laptop's. "
            "It also runs on the CPU alone.",
        ),
        weight=1.5,
    ),
)
